"""Optimizers of embedding tables that update rows in one pass over a batch's lookups.

They are optimizers of torch: schedulers, param groups and ``state_dict`` work, the last interchangeable with
that of torch's optimizer of the same kind. Of a step they touch the rows that the batch looks up, as torch's
do with sparse gradients; sums, states and what is computed are float32, whatever the table is. On a GPU a
step's root and quotient may be off by two units of their last place.

**Direct**, the default: ``backward()`` updates the rows, and no gradient is stored. ``step()`` ends the step:
call it after each ``backward()``, as of any optimizer.

- A second ``backward()`` before ``step()`` raises. Two calls of the same tables in one ``backward()`` make
  one step, as of torch's, by the sum of their gradients; of compiled programs they raise.
- Between ``backward()`` and ``step()``, ``.grad`` is a tensor without values. What computes with it raises:
  clipping, norms, a GradScaler, another optimizer. Hooks on the Parameter are refused, and so are the scaled
  loss of a GradScaler and a DistributedDataParallel that was not told to ignore the tables. Use ``deferred``.
- ``torch.autograd.grad`` and ``backward(inputs=...)`` of other tensors update nothing; in a compiled program
  the backward pass updates whatever it was called for.
- The weight may be changed by hand between steps; in a forward pass that is differentiated, it may not be
  used outside of recfuse's modules: ``step()`` then raises, since the Parameter has a gradient.
- A Parameter with ``requires_grad=False`` is not updated. A copy of the model belongs to no optimizer; a copy
  of both together, as ``copy.deepcopy((model, optimizer))``, works. After the optimizer is deleted, the
  Parameters have gradients again.
- A whole step can be captured in a CUDA graph: forward, ``backward()`` and ``step()``. Kernels read lr and
  the other numbers of a group when they run, and ``group["lr"] = x``, which is what schedulers do, writes
  them to the device,
  asynchronously: outside of the graph, between its replays.

**deferred=True**: ``backward()`` leaves a sparse gradient in ``.grad``, which accumulates, can be clipped
(:func:`clip_grad_norm_`), averaged over processes (:func:`average_gradients`) and unscaled by a GradScaler;
``step()`` updates its rows. It costs the gradient's memory, and a wait for the number of its rows on a GPU,
so that it cannot be captured.

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
