"""``EmbeddingBag``: ``torch.nn.EmbeddingBag`` on recfuse's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from recfuse.errors import refuse_scripting
from recfuse.nn.memory import advise_huge_pages
from recfuse.nn.quantizers import RefusedQconfig
from recfuse.ops import embedding_bag
from recfuse.ops.updates import check_finished, unfinished

if TYPE_CHECKING:
    from recfuse.nn.pinning import PinnedRows


class EmbeddingBag(torch.nn.EmbeddingBag):
    """Drop-in for :class:`torch.nn.EmbeddingBag`: the same constructor, parameters, state_dict and results.

    Holds no state of its own, so a ``torch.nn.EmbeddingBag`` becomes one by a change of class. What
    :meth:`recfuse.Plan.apply` sets is not in the state_dict: it belongs to a machine, not to a model.
    """

    schedule: str = ""
    """How the kernel works; see :func:`recfuse.embedding_bag`. "": by its defaults."""
    qconfig = RefusedQconfig()
    pinned: PinnedRows | None = None
    """Rows kept in the GPU's L2, refreshed before a call. None: none."""

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, *args: Any, **kwargs: Any) -> EmbeddingBag:
        """As torch's; asks for huge pages behind a large table, as for a new one."""
        advise_huge_pages(embeddings.detach())
        return super().from_pretrained(embeddings, *args, **kwargs)

    def reset_parameters(self) -> None:
        """Draws new weights. Asks first for huge pages behind a large table: its rows lie on as many
        pages, and with small ones most lookups miss the TLB too."""
        advise_huge_pages(self.weight.detach())
        super().reset_parameters()

    def extra_repr(self) -> str:
        """As torch's, then that this is recfuse's, and what a plan has set: the class has torch's name."""
        schedule = f", schedule={self.schedule!r}" if self.schedule else ""
        return f"{super().extra_repr()}, recfuse{schedule}" + ", pinned" * (self.pinned is not None)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if unfinished:
            check_finished((self.weight,), "state_dict()")
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses."""
        refuse_scripting(self)

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pools bags of rows.

        Args:
            input: int32 or int64; ``[lookups]`` with ``offsets``, or ``[bags, n]`` without.
            offsets: ``[bags]``, or ``[bags + 1]`` with ``include_last_offset``.
            per_sample_weights: of the shape of ``input`` and the weight's dtype; mode "sum" only.

        Returns:
            ``[bags, embedding_dim]`` of the weight's dtype.

        Raises:
            As :func:`recfuse.embedding_bag`.
        """
        pinned = self.pinned  # read once: unswap may take it away
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
