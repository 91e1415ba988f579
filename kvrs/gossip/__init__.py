"""The place of state and failure detection between nodes. Nothing is here before there are agents to carry it."""
