"""The main peer: FBGEMM's table-batched embeddings.

On a GPU: SplitTableBatchedEmbeddingBagsCodegen, with its default kernels (v1) and with its newer, optional
kernels (v2); for many tables also the inference module with tables that are not quantized (nbit). On the CPU
both modules run, and the faster counts:
  "split": SplitTableBatchedEmbeddingBagsCodegen, the training module, forward only, no bounds check;
  "nbit": IntNBitTableBatchedEmbeddingBagsCodegen, the inference module, fp32 tables and output.
In the wheel fbgemm-gpu-cpu both use a single thread, whatever torch's number of threads. So each also runs in
the best way that a user can arrange: the work cut into equal parts, a Python thread for each part (the
operators release the interpreter lock), outputs concatenated.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor

KINDS = ("split", "nbit")
CUDA_KINDS = ("v1", "v2", "nbit")
Part = tuple[Tensor, Tensor]  # indices, offsets of a thread's share


def fbgemm_missing(package: str = "fbgemm-gpu-cpu") -> str | None:
    """Returns the reason why FBGEMM cannot be used here, or None. `package`: its source."""
    try:
        with _quiet():
            import fbgemm_gpu.split_table_batched_embeddings_ops_inference
            import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"FBGEMM is left out: {reason} (pip install --no-deps {package})"
    return None


@contextlib.contextmanager
def _quiet():
    """Without FBGEMM's warnings about GPU parts that this build lacks."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def fbgemm_usable(names: Iterable[str], package: str) -> tuple[list[str], list[str]]:
    """Returns the candidates without FBGEMM's if it is missing, and a note about that."""
    names = list(names)
    missing = fbgemm_missing(package) if any("fbgemm" in name for name in names) else None
    if missing is None:
        return names, []
    return [name for name in names if "fbgemm" not in name], [missing]


def fbgemm_module(
    kind: str,
    weights: Sequence[Tensor],
    index_dtype: torch.dtype,
    output_dtype: torch.dtype = torch.float32,
) -> Callable[..., Tensor]:
    """Creates FBGEMM's module `kind` (KINDS, on a GPU CUDA_KINDS) with a copy of each table, a feature per
    table.

    weights: [rows, dim] on one device, all of them float32 or, on a GPU, float16. The module takes indices
    [lookups] and offsets [features * bags + 1] of type `index_dtype` and returns [bags, all columns].
    """
    with _quiet():
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
            IntNBitTableBatchedEmbeddingBagsCodegen,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        types = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16}
        precision, device = types[weights[0].dtype], weights[0].device
        cuda = device.type == "cuda"
        location = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
        if kind == "nbit":
            nbit = IntNBitTableBatchedEmbeddingBagsCodegen(
                [(str(number), *weight.shape, precision, location) for number, weight in enumerate(weights)],
                device=device,
                output_dtype=types[output_dtype],
                bounds_check_mode=BoundsCheckMode.NONE,
                indices_dtype=index_dtype,
            )
            nbit.fill_random_weights()
            for (table, _), weight in zip(nbit.split_embedding_weights(), weights, strict=True):
                # Rows may be padded to a multiple of 16 bytes.
                rows = weight.contiguous().view(torch.uint8)
                table[:, : rows.shape[1]].copy_(rows)
            return nbit
        compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
        index_types = {"embedding_table_index_type": index_dtype, "embedding_table_offset_type": index_dtype}
        split = SplitTableBatchedEmbeddingBagsCodegen(
            [(*weight.shape, location, compute) for weight in weights],
            bounds_check_mode=BoundsCheckMode.NONE,
            use_experimental_tbe=kind == "v2",
            weights_precision=precision,
            output_dtype=types[output_dtype],
            device=device,
            **({} if cuda else index_types),
        )
    for table, weight in zip(split.split_embedding_weights(), weights, strict=True):
        table.detach().copy_(weight)
    return split


def fbgemm_trainer(
    weights: Sequence[Tensor], index_dtype: torch.dtype, optimizer: str, learning_rate: float, eps: float
) -> torch.nn.Module:
    """Creates FBGEMM's training module, with an EmbOptimType and a feature for each table [rows, dim] of
    float32.

    It updates in the backward pass. If the tables are consecutive in memory the module trains them in place,
    otherwise it trains copies. It takes indices and offsets of `index_dtype`.
    """
    with _quiet():
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        cuda = weights[0].device.type == "cuda"
        location = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
        index_types = {"embedding_table_index_type": index_dtype, "embedding_table_offset_type": index_dtype}
        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(*weight.shape, location, compute) for weight in weights],
            optimizer=getattr(EmbOptimType, optimizer),
            learning_rate=learning_rate,
            eps=eps,
            stochastic_rounding=False,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=weights[0].device,
            **({} if cuda else index_types),
        )
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    if all(end == weight.data_ptr() for end, weight in zip(ends, weights[1:], strict=False)):
        flat = weights[0].as_strided((sum(weight.numel() for weight in weights),), (1,))
        (module.weights_dev if cuda else module.weights_host).data = flat
    else:
        for table, weight in zip(module.split_embedding_weights(), weights, strict=True):
            table.detach().copy_(weight)
    return module


def _stay_on_one_thread() -> None:
    """Makes parallel operators of this Python thread use no other threads."""
    torch.set_num_threads(1)
    # A thread adopts torch's setting when it first reads it: read it before the setting changes again.
    torch.get_num_threads()


class InThreads:
    """Modules called side by side, a Python thread each, on parts of the work; outputs are concatenated."""

    def __init__(self, modules: Sequence[Callable[..., Tensor]], dim: int) -> None:
        """`dim`: outputs are concatenated along it."""
        self._modules = modules
        self._dim = dim
        # Each Python thread that runs a parallel operator starts an OpenMP team of its own; with more threads
        # than cores OpenMP then stops spinning, which slows every other candidate of the process down.
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(len(modules), initializer=_stay_on_one_thread)
        barrier = Barrier(len(modules))
        list(self._pool.map(lambda _: barrier.wait(), modules))
        torch.set_num_threads(threads)

    def __call__(self, parts: Sequence[Part]) -> Tensor:
        """Returns the output of all parts, a part per module."""
        return torch.cat(list(self._pool.map(self._run, self._modules, parts)), self._dim)

    @staticmethod
    def _run(module: Callable[..., Tensor], part: Part) -> Tensor:
        with torch.no_grad():  # grad mode belongs to a thread
            return module(*part)


def balanced_cuts(costs: Tensor, parts: int) -> list[int]:
    """Returns bounds that cut [0, len(costs)) into up to `parts` nonempty ranges of about equal cost."""
    total = torch.cumsum(costs.double(), 0)
    goals = total[-1] * torch.arange(1, parts) / parts
    inner = (torch.searchsorted(total, goals) + 1).tolist()
    return sorted({0, *(min(cut, len(costs)) for cut in inner), len(costs)})


def rebased(indices: Tensor, offsets: Tensor, first: int, last: int) -> Part:
    """Returns the indices and offsets of the bags [first, last), with offsets from 0."""
    span = offsets[first : last + 1]
    return indices[span[0] : span[-1]].clone(), span - span[0]
