"""Processes among which an instance is divided.

All are on one node, because everything that they share is memory which the head maps. Tensor
parallelism over a network would not pay: two sums in each layer. Stages on several nodes would, and
no bit would change, since rows between stages are float32 already. They need, in this order:

- Layouts of some layers. `Share` takes its first and last stage from the layout, plans and
  `Reforming` demand an owner for every unit of the model, and a cell's column in memory is counted
  from layer 0.
- A head for each node: what `RankGroup` does for all stages, for those of its node, with rows that
  enter and leave its formation as they do between stages. It owns cells, units and formations
  there, re-forms alone, and is an actor of its own, with a port, in the launcher's list.
- A worker that is several of them: orders and rows over the stream and hand-shake of the page port,
  with epoch and number of the batch; the root of the weights from the hashes of all
  (`digests.root_of`); pages put together by layers, in which each node's cells are one run.
- Death without shared memory: the end of a connection, and the limit of a batch for a cut link. A
  lost node is a lost stage, for which nothing is left on the others: another instance's stage would
  have to stand in, or the instance ends.
"""
