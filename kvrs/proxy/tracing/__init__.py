"""Traces of requests, sent by OTLP."""
