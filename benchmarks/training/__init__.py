"""Training steps: FusedEmbeddingBagCollection against a loop of torch's nn.EmbeddingBag, and one bag alone.

A step is zero_grad, the forward pass, backward from a given gradient of the output, and a step of the
optimizer. All sides hold the same values, get the same batches, and take turns; what the first step changes
is compared.

On the CPU: plain SGD. Each shape with dense and with sparse gradients; with sparse ones also by
recfuse.optim.SGD, whose updates happen in the backward pass. The bag alone has the shape of a text
classifier: a few bags of many lookups, the mean of a large and of a small vocabulary.

With --device cuda: RecFlex's models A and D, MLPerf's tables and dynamicemb's case, with SGD, row-wise
Adagrad and Adam, beside torch's loop and FBGEMM, whole and by stage, with the bytes that a step needs at
least.

The figure convergence learns a task of Criteo's shape by torch's optimizers and by recfuse's, and compares
the losses of all steps.
"""

from common.registry import Benchmark

bench = Benchmark(
    "training", __doc__, ["flags", "cpu", "steps", "convergence", "parts"], rounds=21, plots="training"
)
