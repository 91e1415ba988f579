"""The processes (ranks) of one instance, for tensor and pipeline parallelism.

Ranks share memory and sleep on futexes, and one rank may die without the others. Collective
libraries add in their own order, take milliseconds for small sums on few cores, and cannot go on
with fewer members.

The ranks of a stage are on one node and share memory, because each layer has two sums, which are
too slow over a network. Stages can be on several nodes. `group.py` runs and re-forms the ranks of
some or all stages (`stages.py`). `nodes.py` combines groups of stages behind one interface: the
group of its own process, and one group per stage host (`host.py`), reached by `remote.py` over the
messages of `link.py`. Hosts outlive the instance's process, serve the next one (`sessions.py`), and
exchange parts of pages as replicas (`replicate.py`).

Each group plans with the layout of the whole model and never changes other groups' stages. A lost
host loses the whole stage: the instance goes on with the host of another instance, which may have
replicas, or waits for a new host (`returning.py`).

Rows pass from stage to stage through the instance's process, which is one hop more than needed
between two remote stages.
"""
