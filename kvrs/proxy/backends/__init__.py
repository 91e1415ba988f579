"""What a proxy asks of the processes of a cluster: the interface to instances, and a module per engine behind it."""
