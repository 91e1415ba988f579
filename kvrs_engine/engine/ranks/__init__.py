"""Processes among which an instance is divided.

Ranks share memory, sleep on futexes and die alone. Collective libraries add in their own order,
take milliseconds for small sums on few cores, and cannot go on with fewer members.

Those of a stage are on one node, and share memory which its head maps: tensor parallelism over a
network would not pay, two sums in each layer. Stages can be on several nodes. `group.py` has the
ranks of all stages or of some, in a formation which rows enter and leave as they do between stages
(`stages.py`), and re-forms them. `nodes.py` puts together groups of stages with one contract: those
below its own process, and one for each host of a stage (`host.py`, which `remote.py` reaches over
the messages of `link.py`). Hosts outlive the process of the instance, and serve the next one
(`sessions.py`), and bring each other parts of pages as replicas (`replicate.py`).

Each group plans with the layout of the whole model, in which the stages of others never change. A
lost host is a lost stage, of which nothing is left on the others: the instance goes on with the
host of another one, which may have replicas, or waits for the next (`returning.py`).

Rows go from one stage to the next by way of the process of the instance, which is one hop more than
needed where two stages that follow each other are both elsewhere.
"""
