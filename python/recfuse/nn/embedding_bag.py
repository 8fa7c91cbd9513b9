"""``EmbeddingBag``: ``torch.nn.EmbeddingBag`` on recfuse's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from recfuse.errors import refuse_scripting
from recfuse.nn.memory import advise_huge_pages
from recfuse.nn.refusals import RefusedQconfig
from recfuse.ops import embedding_bag
from recfuse.ops.updates import check_finished, unfinished

if TYPE_CHECKING:
    from recfuse.nn.pinning import PinnedRows


class EmbeddingBag(torch.nn.EmbeddingBag):
    """Drop-in for :class:`torch.nn.EmbeddingBag`: the same constructor, parameters, state_dict and results.

    It has no state of its own, so a ``torch.nn.EmbeddingBag`` becomes one by a change of class. The
    ``state_dict`` does not contain ``schedule`` and ``pinned``, because they depend on the machine;
    :meth:`recfuse.Plan.apply` sets both.

    Args:
        num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq, mode, sparse: as in torch.
        include_last_offset, padding_idx, device, dtype: as in torch.

    Attributes:
        schedule: the schedule of the kernel; see :func:`recfuse.embedding_bag`. "" for the default.
        pinned: rows pinned in the GPU's L2, refreshed before a call; or None.

    Shape:
        - input: ``[lookups]`` with ``offsets``, or ``[bags, n]``.
        - offsets: ``[bags]``, or ``[bags + 1]`` with ``include_last_offset``.
        - output: ``[bags, embedding_dim]``.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(1000, 16, mode="sum")
        >>> table(torch.tensor([1, 5, 7]), torch.tensor([0, 2])).shape
        torch.Size([2, 16])

    Note:
        recfuse's kernels serve float32, float16 and bfloat16 tables on the CPU and on CUDA devices; other
        tables use torch's. Gradients are dense, or sparse with ``sparse=True``. Forward-mode and second
        derivatives raise.

    Source: Jain et al., MICRO 2024.
    """

    schedule: str = ""
    qconfig = RefusedQconfig()
    pinned: PinnedRows | None = None

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, *args: Any, **kwargs: Any) -> EmbeddingBag:
        """Create a module from weights, as torch's. Requests huge pages for a large table.

        Args:
            embeddings: the weights ``[rows, dim]``.
            args, kwargs: the further arguments of ``torch.nn.EmbeddingBag.from_pretrained``.

        Returns:
            EmbeddingBag: the module.
        """
        advise_huge_pages(embeddings.detach())
        return super().from_pretrained(embeddings, *args, **kwargs)

    def reset_parameters(self) -> None:
        """Draw new weights.

        First it requests huge pages for a large table: with small pages most lookups miss the TLB too.
        """
        advise_huge_pages(self.weight.detach())
        super().reset_parameters()

    def extra_repr(self) -> str:
        """Return torch's text, ``recfuse``, and the schedule and pinned rows of a plan."""
        schedule = f", schedule={self.schedule!r}" if self.schedule else ""
        return f"{super().extra_repr()}, recfuse{schedule}" + ", pinned" * (self.pinned is not None)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if unfinished:
            check_finished((self.weight,), "state_dict()")
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError."""
        refuse_scripting(self)

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pool bags of rows.

        Args:
            input: int32 or int64; ``[lookups]`` with ``offsets``, or ``[bags, n]`` without.
            offsets: ``[bags]``, or ``[bags + 1]`` with ``include_last_offset``.
            per_sample_weights: weights of the shape of ``input`` and the dtype of the weight; mode "sum"
                only.

        Returns:
            Tensor: ``[bags, embedding_dim]`` in the dtype of the weight.

        Raises:
            IndexError: as :func:`recfuse.embedding_bag`, and so are other errors.
        """
        pinned = self.pinned  # read once: unswap may remove it
        if pinned is not None and not torch.compiler.is_compiling():
            pinned.step()
        weight = self._parameters.get("weight")  # without torch's __getattr__, which takes a microsecond
        return embedding_bag(
            input,
            self.weight if weight is None else weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
            schedule=self.schedule,
        )
