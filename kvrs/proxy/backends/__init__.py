"""A proxy's requests to the processes of a cluster: the interface `Backend` to instances, and a
module per engine that implements it.
"""
