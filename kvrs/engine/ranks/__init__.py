"""Processes among which an instance is divided.

Ranks share memory, sleep on futexes and die alone. Collective libraries add in their own order,
take milliseconds for small sums on few cores, and cannot go on with fewer members.

Those of a stage are on one node, and share memory which its head maps: tensor parallelism over a
network would not pay, two sums in each layer. Stages can be on several nodes. `stages.py` is what
both cases share: the ranks of some stages, in a formation which rows enter and leave as they do
between stages. `group.py` has all stages on one node, and re-forms them. `nodes.py` puts together
groups of stages with one contract (`local.py`): those of its own node, and one for each host of a
stage (`host.py`, which `remote.py` reaches over the messages of `link.py`). Hosts outlive the
process of the instance, and serve the next one (`sessions.py`).

An instance on several nodes does not re-form. It would need:

- A re-forming in each node's group, which plans and `Reforming` cannot describe: they demand an
  owner for every unit of the model. The process of the instance would have to agree with the hosts
  on epochs.
- For a lost node, which is a lost stage, with nothing left of it on the others, another instance's
  stage in its place.

Rows go from one stage to the next by way of the process of the instance, which is one hop more than
needed where two stages that follow each other are both elsewhere.
"""
