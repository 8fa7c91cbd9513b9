"""Optimizers of embedding tables that update rows in a single pass over the lookups of a batch.

They are optimizers of torch: schedulers, param groups and ``state_dict`` work, and their state dicts are
interchangeable with those of torch's optimizer of the same kind. A step touches only the looked-up rows, as
torch's steps with sparse gradients. Sums, states and computation are in float32 for tables of any dtype. On a
GPU the root and the quotient of a step may have an error of two units in the last place.

**In backward**, the default: ``backward()`` updates the rows and stores no gradient. ``step()`` ends the
step: call it after each ``backward()``.

- A second ``backward()`` before ``step()`` raises. Two calls of the same tables in one ``backward()`` make a
  single step with the sum of their gradients, as in torch; in compiled programs they raise.
- Between ``backward()`` and ``step()``, ``.grad`` is a tensor without values. Computation with it raises:
  clipping, norms, a GradScaler, another optimizer. Hooks on the Parameter raise, and so do the scaled loss of
  a GradScaler and a DistributedDataParallel that was not told to ignore the tables. Use ``deferred`` for
  these.
- ``torch.autograd.grad`` and ``backward(inputs=...)`` of other tensors update nothing. In a compiled program
  the backward pass always updates.
- You may change the weight between steps. In a differentiated forward pass, use outside of recfuse's modules
  gives the Parameter a gradient, and ``step()`` raises.
- A Parameter with ``requires_grad=False`` is not updated. A copy of the model belongs to no optimizer; a
  common copy, such as ``copy.deepcopy((model, optimizer))``, works. After the optimizer is deleted, the
  Parameters have gradients again.
- A CUDA graph may capture a whole step: forward, ``backward()`` and ``step()``. Kernels read lr and the other
  numbers of a group when they run. ``group["lr"] = x``, which schedulers do, writes the number to the device,
  asynchronously: outside of the graph, between its replays.

**deferred=True**: ``backward()`` leaves a sparse gradient in ``.grad``. It accumulates, can be clipped
(:func:`clip_grad_norm_`), averaged over processes (:func:`average_gradients`) and unscaled by a GradScaler;
``step()`` updates its rows. It costs the memory of the gradient and, on a GPU, a wait for the number of its
rows, so it cannot be captured.

Sources: FBGEMM's table-batched embedding (updates in the backward pass); Gupta et al., 2020 (row-wise
Adagrad); Zamani et al., "High-Accuracy Low-Precision Training", 2018, and FBGEMM (stochastic rounding).
"""

from recfuse.optim.clipping import clip_grad_norm_
from recfuse.optim.kinds import SGD, Adagrad, Adam, RowWiseAdagrad
from recfuse.optim.parallel import average_gradients
from recfuse.optim.parameters import embedding_parameters

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "RowWiseAdagrad",
    "average_gradients",
    "clip_grad_norm_",
    "embedding_parameters",
]
