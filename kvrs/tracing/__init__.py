"""Traces of requests through proxies and engines, sent by OTLP."""
