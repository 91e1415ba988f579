"""HTTP servers and clients, TLS, and the connections of the processes."""
