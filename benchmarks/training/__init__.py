"""Training steps: FusedEmbeddingBagCollection against a loop of torch's nn.EmbeddingBag, and a single bag.

A step is zero_grad, the forward pass, backward from a given gradient of the output, and a step of the
optimizer. All sides hold the same values, get the same batches, and take turns; the changes of the first step
are compared.

On the CPU: plain SGD. Each shape with dense and with sparse gradients; with sparse ones also by
recfuse.optim.SGD, which updates in the backward pass. The single bag has the shape of a text classifier: a
few bags of many lookups, the mean of a large and of a small vocabulary.

With --device cuda: RecFlex's models A and D, MLPerf's tables and dynamicemb's case, with SGD, row-wise
Adagrad and Adam, against torch's loop and FBGEMM, whole and by stage, with the least bytes of a step.

The figure convergence learns a task of Criteo's shape by torch's optimizers and by recfuse's, and compares
the losses of all steps.
"""

from common.registry import Benchmark

bench = Benchmark(
    "training", __doc__, ["flags", "cpu", "steps", "convergence", "parts"], rounds=21, plots="training"
)
