"""What recfuse is compared with: FBGEMM's table-batched embeddings.

On a GPU: SplitTableBatchedEmbeddingBagsCodegen, with the kernels that it comes with (v1) and with the newer
ones that it has to be asked for (v2); for many tables also the inference module with tables that are not
quantized (nbit). On the CPU two modules, of which both are run and the faster counts:
  "split": SplitTableBatchedEmbeddingBagsCodegen, the training module, forward only, no bounds check;
  "nbit": IntNBitTableBatchedEmbeddingBagsCodegen, the inference module, fp32 tables and output.
In the wheel fbgemm-gpu-cpu both run on one thread, whatever torch's number of threads. So each is also
run in the best way that a user can arrange: the work cut into as many equal parts as there are threads,
a Python thread each (their operators release the interpreter lock), outputs concatenated.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor

KINDS = ("split", "nbit")
CUDA_KINDS = ("v1", "v2", "nbit")
Part = tuple[Tensor, Tensor]  # indices, offsets of one thread's share


def fbgemm_missing(package: str = "fbgemm-gpu-cpu") -> str | None:
    """Why FBGEMM cannot be used here, or None. `package`: where to get it."""
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


def fbgemm_module(kind: str, weights: Sequence[Tensor], index_dtype: torch.dtype) -> Callable[..., Tensor]:
    """FBGEMM's module `kind` with tables of these fp32 values [rows, dim]; called with indices, offsets."""
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

        if kind == "split":
            split = SplitTableBatchedEmbeddingBagsCodegen(
                [(*weight.shape, EmbeddingLocation.HOST, ComputeDevice.CPU) for weight in weights],
                bounds_check_mode=BoundsCheckMode.NONE,
                embedding_table_index_type=index_dtype,
                embedding_table_offset_type=index_dtype,
            )
            for table, weight in zip(split.split_embedding_weights(), weights, strict=True):
                table.detach().copy_(weight)
            return split
        nbit = IntNBitTableBatchedEmbeddingBagsCodegen(
            [
                (str(number), *weight.shape, SparseType.FP32, EmbeddingLocation.HOST)
                for number, weight in enumerate(weights)
            ],
            device="cpu",
            output_dtype=SparseType.FP32,
            bounds_check_mode=BoundsCheckMode.NONE,
            indices_dtype=index_dtype,
        )
        nbit.fill_random_weights()
        for (table, _), weight in zip(nbit.split_embedding_weights(), weights, strict=True):
            table.copy_(weight.contiguous().view(torch.uint8))
        return nbit


def fbgemm_on_cuda(weight: Tensor, experimental: bool) -> Callable[..., Tensor]:
    """FBGEMM's GPU module with a copy of one fp32 table [rows, dim]; called with indices, offsets (int64)."""
    with _quiet():
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(*weight.shape, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
            bounds_check_mode=BoundsCheckMode.NONE,
            use_experimental_tbe=experimental,
            device=weight.device,
        )
    module.split_embedding_weights()[0].detach().copy_(weight)
    return module


def fbgemm_collection_on_cuda(
    kind: str, weights: Sequence[Tensor], index_dtype: torch.dtype, output_dtype: torch.dtype
) -> Callable[..., Tensor]:
    """FBGEMM's GPU module `kind` (of CUDA_KINDS) with a copy of each of these tables, a feature each.

    weights: [rows, dim] on one GPU, all of them float32 or all of them float16. Called with indices
    [lookups] and offsets [features * bags + 1], of type `index_dtype`; gives [bags, all columns].
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
        if kind == "nbit":
            nbit = IntNBitTableBatchedEmbeddingBagsCodegen(
                [
                    (str(number), *weight.shape, precision, EmbeddingLocation.DEVICE)
                    for number, weight in enumerate(weights)
                ],
                device=device,
                output_dtype=types[output_dtype],
                bounds_check_mode=BoundsCheckMode.NONE,
                indices_dtype=index_dtype,
            )
            nbit.fill_random_weights()
            for (table, _), weight in zip(nbit.split_embedding_weights(), weights, strict=True):
                # Rows may be padded to whole words of 16 bytes.
                rows = weight.contiguous().view(torch.uint8)
                table[:, : rows.shape[1]].copy_(rows)
            return nbit
        split = SplitTableBatchedEmbeddingBagsCodegen(
            [(*weight.shape, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for weight in weights],
            bounds_check_mode=BoundsCheckMode.NONE,
            use_experimental_tbe=kind == "v2",
            weights_precision=precision,
            output_dtype=types[output_dtype],
            device=device,
        )
    for table, weight in zip(split.split_embedding_weights(), weights, strict=True):
        table.detach().copy_(weight)
    return split


def _stay_on_one_thread() -> None:
    """Let this Python thread, alone, run parallel operators by itself."""
    torch.set_num_threads(1)
    # A thread takes over torch's setting at its first question for it: ask before the setting changes again.
    torch.get_num_threads()


class InThreads:
    """Modules called side by side, a Python thread each, on parts of the work; outputs are concatenated."""

    def __init__(self, modules: Sequence[Callable[..., Tensor]], dim: int) -> None:
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
        return torch.cat(list(self._pool.map(self._run, self._modules, parts)), self._dim)

    @staticmethod
    def _run(module: Callable[..., Tensor], part: Part) -> Tensor:
        with torch.no_grad():  # grad mode belongs to a thread
            return module(*part)


def balanced_cuts(costs: Tensor, parts: int) -> list[int]:
    """Bounds that cut [0, len(costs)) into up to `parts` ranges of about equal cost, none of them empty."""
    total = torch.cumsum(costs.double(), 0)
    goals = total[-1] * torch.arange(1, parts) / parts
    inner = (torch.searchsorted(total, goals) + 1).tolist()
    return sorted({0, *(min(cut, len(costs)) for cut in inner), len(costs)})


def rebased(indices: Tensor, offsets: Tensor, first: int, last: int) -> Part:
    """The indices and offsets of bags [first, last), offsets starting at 0."""
    span = offsets[first : last + 1]
    return indices[span[0] : span[-1]].clone(), span - span[0]
