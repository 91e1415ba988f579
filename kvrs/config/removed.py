"""Settings of earlier versions, and what to use instead. `settings.py` names them in its errors."""

# By the path of the key, without the numbers of list items.
REMOVED = {
    "speculation.when": "set speculation.source: draft, and speculation.draft",
}
