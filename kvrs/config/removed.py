"""Settings of earlier versions, and what to use instead. `settings.py` names them in its errors."""

# By the path of the key, without the numbers of list items.
REMOVED = {
    "models": "start a proxy for each model, and let the gateway route by name (kvrs docs beside)",
    "proxy.allowed_origins": "have the gateway in front answer web pages of other sites (CORS)",
    "proxy.numbered_peers": "name all proxies in proxy.peers; a proxy leaves its own entry out",
    "proxy.unknown_fields": "leave the fields out at the client, or have a gateway remove them",
    "speculation.when": "set speculation.source: draft, and speculation.draft",
}
