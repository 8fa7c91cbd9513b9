"""``PackedModule``: what modules with packed tables have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse._codes import DTYPES
from recfuse.data.forms import Lookups, each_batch
from recfuse.errors import ArgumentValueError
from recfuse.nn.mapping import Mapper, Mapping
from recfuse.nn.packed import state
from recfuse.nn.packed.holders import check_holders
from recfuse.nn.packed.layout import (
    Group,
    Layout,
    PackedSpec,
    Wanted,
    feature_tensor,
    group_weights,
    parameter_names,
)
from recfuse.nn.packed.memory import advise_huge_pages
from recfuse.nn.packed.optimizer_parts import given
from recfuse.nn.packed.optimizers import plan_move
from recfuse.nn.packed.pooling import check_mapping, has_kernel, on_gpu, pool_one_by_one, table_call
from recfuse.nn.packed.table import Tables
from recfuse.nn.tuning import Tuning
from recfuse.ops import fused_embedding_bag
from recfuse.ops.fakes import fused_dtype


class PackedModule(torch.nn.Module):
    """Mixin for modules whose tables are ranges of rows of a few Parameters ``[rows, dim]``.

    There is one Parameter for each dtype, dim and device of the tables; tables that are frozen, or in another
    group of an optimizer, have one of their own. Calls, compiled and exported programs and optimizers all
    read and write these alone. ``state_dict`` and ``load_state_dict`` speak of tables, by the names that they
    had before.
    """

    layout: Layout
    """Where the tables lie. Another layout is another object."""

    _table_prefix = "embedding_bags."
    """What the names of tables begin with in the state_dict."""

    def _pack(
        self,
        names: Sequence[str],
        bags: Sequence[torch.nn.EmbeddingBag],
        table_of_feature: Sequence[int],
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Takes over the weights of ``bags``: copies each into its rows and makes the old Parameter a view of
        them, matrix by matrix, so that little is there twice. ``optimizers`` go on with the new Parameters.

        Raises:
            ValueError: an optimizer that cannot go on, or one that holds an old Parameter and was not given;
                nothing has changed then.
        """
        weights = list({id(bag.weight): bag.weight for bag in bags}.values())
        numbers = {id(weight): number for number, weight in enumerate(weights)}
        optimizers = given(optimizers, f"recfuse.nn.{type(self).__name__}")
        move = plan_move(optimizers, weights, f"recfuse.nn.{type(self).__name__}")
        check_holders(weights, optimizers, f"recfuse.nn.{type(self).__name__}")
        groups = group_weights(
            [
                Wanted(*weight.shape, weight.dtype, weight.device, weight.requires_grad, tag)
                for weight, tag in zip(weights, move.tags, strict=True)
            ]
        )
        moved = []
        for name, parameter, group in self._allocate(groups):
            with torch.no_grad():
                for number, first_row in group.members:
                    old = weights[number]
                    rows = parameter.data.narrow(0, first_row, old.shape[0])
                    rows.copy_(old)
                    if not old.is_inference():
                        old.data = rows
            moved.append((parameter, name, group.members))
        places = _places(groups)
        specs = [
            PackedSpec(
                name,
                bag.num_embeddings,
                bag.embedding_dim,
                bag.mode,
                bag.padding_idx,
                bag.include_last_offset,
                *places[numbers[id(bag.weight)]],
            )
            for name, bag in zip(names, bags, strict=True)
        ]
        self._set_layout(specs, table_of_feature, parameter_names(groups), bags[0].sparse if bags else False)
        move.apply(moved)

    def _pack_new(
        self,
        specs: Sequence[PackedSpec],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        table_of_feature: Sequence[int],
        sparse: bool,
    ) -> None:
        """Makes new tables, whose values are not set yet; places in ``specs`` are still to be found."""
        groups = group_weights(
            [
                Wanted(spec.num_embeddings, spec.embedding_dim, dtype, device)
                for spec, dtype in zip(specs, dtypes, strict=True)
            ]
        )
        for _ in self._allocate(groups):
            pass
        places = _places(groups)
        placed = [
            spec._replace(group=places[number][0], first_row=places[number][1])
            for number, spec in enumerate(specs)
        ]
        self._set_layout(placed, table_of_feature, parameter_names(groups), sparse)

    def _allocate(self, groups: Sequence[Group]) -> Iterator[tuple[str, Parameter, Group]]:
        """Registers a Parameter a group, one after the other; gap rows are zero, others not set."""
        for name, group in zip(parameter_names(groups), groups, strict=True):
            like = group.like
            with torch.inference_mode(False), torch.no_grad():
                data = torch.empty((group.rows, like.dim), dtype=like.dtype, device=like.device)
                advise_huge_pages(data)
                for first, end in group.gaps:
                    data[first:end].zero_()
                parameter = Parameter(data, requires_grad=like.requires_grad)
            self.register_parameter(name, parameter)
            yield name, parameter, group

    def _set_layout(
        self,
        specs: Sequence[PackedSpec],
        table_of_feature: Sequence[int],
        names: tuple[str, ...],
        sparse: bool,
    ) -> None:
        dims = tuple(specs[table].embedding_dim for table in table_of_feature)
        self.layout = Layout(
            tuple(specs),
            tuple(table_of_feature),
            names,
            feature_tensor(specs, table_of_feature),
            dims,
            sum(dims),
            sparse,
            any(specs[table].mode == "max" for table in table_of_feature),
        )
        self._tuning = Tuning(len(dims))
        self._mapper = Mapper()
        self._weights_changed()

    def _weights_changed(self) -> None:
        """Notes dtypes and device of the weights, by which the GPU's work is planned."""
        weights = self.packed_weights()
        dtypes = [weights[self.layout.tables[number].group].dtype for number in self.layout.table_of_feature]
        self._tuning.fit(list(zip(self.layout.dims, dtypes, strict=True)))
        self._mapper.use(weights[0].device if self.on_cuda else None)

    def __setattr__(self, name: str, value: Any) -> None:
        """As of any module; what the class computes, such as ``tables``, is not hidden behind a module."""
        if isinstance(value, torch.nn.Module) and isinstance(getattr(type(self), name, None), property):
            raise AttributeError(
                f"recfuse: {name} of a {type(self).__name__} cannot be set: calls would not use it. Assign "
                f"to the weights, as in {name}[key].weight = ..., or recfuse.unswap(model) first"
            )
        super().__setattr__(name, value)

    def packed_weights(self) -> list[Tensor]:
        """The Parameters now: ``[rows, dim]`` each, in the order of the layout's groups."""
        parameters = self._parameters
        try:
            return [parameters[name] for name in self.layout.parameter_names]
        except KeyError:  # parametrized or pruned: computed by the class or by a hook
            return [getattr(self, name) for name in self.layout.parameter_names]

    @property
    def tables(self) -> Tables:
        """The tables by name, each with ``weight`` (a view), rows, dim and mode."""
        return Tables(self)

    @property
    def has_kernel(self) -> bool:
        """Whether one call can pool all tables: on one device that has kernels for their dtypes."""
        return has_kernel(self.packed_weights())

    @property
    def on_cuda(self) -> bool:
        """Whether they are all on one CUDA device."""
        weights = self.packed_weights()
        return on_gpu(weights) and has_kernel(weights)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the tables anew, in order, from a normal distribution; padding rows are zero."""
        for table in self.tables.values():
            torch.nn.init.normal_(table.weight)
            if table.padding_idx is not None:
                table.weight[table.padding_idx].fill_(0)

    def _pool(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        mapping: Mapping | None = None,
    ) -> Tensor:
        """Pools feature-major jagged lookups; see :class:`recfuse.nn.FusedEmbeddingBagCollection`."""
        layout, weights = self.layout, self.packed_weights()
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.mark_static(layout.features)  # as many as there are, whatever the batch
        if mapping is not None:
            check_mapping(mapping, layout, offsets)
        if not has_kernel(weights):
            return pool_one_by_one(layout, weights, indices, offsets, per_sample_weights)
        arguments = weights, layout.features, indices, offsets, layout.output_dim, per_sample_weights
        if not on_gpu(weights):
            return fused_embedding_bag(*arguments, sparse=layout.sparse, any_max=layout.any_max)
        schedules, warps, work = self._work(offsets, mapping)
        return fused_embedding_bag(
            *arguments,
            sparse=layout.sparse,
            schedules=schedules,
            warps=warps,
            mapping=work,
            any_max=layout.any_max,
        )

    def _work(self, offsets: Tensor, mapping: Mapping | None) -> tuple[Tensor | None, int, Tensor | None]:
        """schedules, warps and mapping of a call on a GPU."""
        if mapping is not None:
            return mapping.schedules, mapping.warps, mapping.tensor
        tuning = self._tuning
        if tuning.schedules is None and type(offsets) is Tensor and not torch.compiler.is_compiling():
            tuning.learn(offsets)
        return tuning.schedules, tuning.warps, None

    def _pool_table(
        self, spec: PackedSpec, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        """One table alone, as ``torch.nn.EmbeddingBag`` takes its arguments."""
        return table_call(
            spec, self.packed_weights()[spec.group], self.layout.sparse, input, offsets, per_sample_weights
        )

    @property
    def plan(self) -> Any:
        """The plan that was applied to this module, as long as it fits its tables; None: none."""
        return self._tuning.plan

    @plan.setter
    def plan(self, plan: Any) -> None:
        self._tuning.plan = plan

    @property
    def schedules(self) -> Tensor | None:
        """int32 ``[features, 5]`` on the host; None: nothing is known yet. Not in the state_dict."""
        return self._tuning.schedules

    @property
    def warps(self) -> int:
        """The most warps that an SM runs at once; 0: the default."""
        return self._tuning.warps

    def set_plan(self, schedules: Any, warps: int = 0) -> None:
        """Says how the GPU works on each feature, instead of the defaults; None: the defaults again.

        Args:
            schedules: int32 ``[features, 5]`` (kind, threads, distance, split, expected lookups of a
                bag times 16 with 0 for unknown and -1 for none), or a sequence of texts, one a feature; see
                :func:`recfuse.fused_embedding_bag`.
            warps: the most warps that an SM runs at once; 0: the default.

        What it sets belongs to a machine, not to a model: it is not in the state_dict.

        Raises:
            ValueError, TypeError: schedules of another shape or kind, a text that is none. What a kernel
                cannot do is raised by the next call on a GPU.
        """
        self._tuning.set(schedules, warps)

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Learns how many lookups a bag of each feature has, which says how much work a batch is for a GPU.

        Without it the first call on a GPU learns that from its own batch, and waits for it once. The
        results do not depend on it, other than in the order of sums; with the same batches it is always the
        same.

        Args:
            batches: batches as ``forward`` (``pool`` of a list) takes them; on any device.

        Raises:
            ValueError, TypeError: no batch has a lookup, or one is of another form.
        """
        function = f"recfuse.nn.{type(self).__name__}.calibrate"
        given = (self._lookups_of(batch, where) for where, batch in each_batch(batches, function))
        self._tuning.calibrate(lookups.offsets for lookups in given)

    def map(self, batch: Any) -> Mapping:
        """Shares out one batch's work by its own lengths, on the host: best in the thread that loads it.

        Takes neither the GIL, while it works, nor the GPU. Where nothing was learned yet, it learns as
        :meth:`calibrate` does, from this batch.

        Args:
            batch: int32 or int64 offsets ``[features * bags + 1]`` of the batch, a CPU tensor or a NumPy
                array; or the batch in the form that ``forward`` (``pool`` of a list) takes, on the CPU.

        Returns:
            What ``forward`` takes as ``mapping`` with this batch; page-locked where the tables are on a GPU.

        Raises:
            ValueError, TypeError: offsets that are no such array, that do not rise from 0; tables that one
                call does not pool.
        """
        offsets = batch
        if not isinstance(batch, (Tensor, np.ndarray)):
            offsets = self._lookups_of(batch, f"recfuse.nn.{type(self).__name__}.map: batch").offsets
        weights = self.packed_weights()
        if not has_kernel(weights):
            raise ArgumentValueError(
                "recfuse: these tables are not pooled in one call, so there is no work to share out: all "
                "must be on the CPU or on one CUDA device, and float32, float16 or bfloat16"
            )
        device = weights[0].device if on_gpu(weights) else None
        return self._mapper.map(self._tuning, self.native_call(), self.layout.features, offsets, device)

    def native_call(self) -> tuple[Any, ...]:
        """What the C library wants to know of the tables: addresses, sizes and dtypes of the weights, the
        features, dtype and columns of the output.
        """
        weights, layout = self.packed_weights(), self.layout
        buffers = [(one.data_ptr(), one.numel(), DTYPES.index(one.dtype)) for one in weights]
        dtype = fused_dtype([one.dtype for one in weights])
        return buffers, layout.features.numpy(), DTYPES.index(dtype), layout.output_dim

    def _lookups_of(self, batch: Any, where: str) -> Lookups:
        """A batch, in the form that a call of this class takes; TypeError, ValueError where it is none."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        super()._apply(fn, recurse)
        self._weights_changed()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state.save(self, destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missing: list[str] = []
        unexpected: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected, error_msgs
        )
        own = state.load(self, state_dict, prefix, local_metadata, error_msgs)
        packed = {prefix + name for name in self.layout.parameter_names}
        missing_keys.extend(key for key in missing if key not in packed)
        unexpected_keys.extend(key for key in unexpected if key not in own.found)
        if strict:
            missing_keys.extend(own.missing)
        self._weights_changed()

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses, where torch.jit.script would fail at some line of this class."""
        raise NotImplementedError(
            f"recfuse: a {type(self).__name__} cannot be scripted; recfuse.unswap(model) gives modules back "
            "that can, and torch.jit.trace, torch.export and torch.compile take it as it is"
        )

    def __getstate__(self) -> dict[str, Any]:
        """State without what belongs to this process."""
        own = self.__dict__.copy()
        own["_mapper"], own["_tuning"] = None, self._tuning.copy()
        return own

    def __setstate__(self, own: dict[str, Any]) -> None:
        """Takes the state."""
        super().__setstate__(own)
        self._mapper = Mapper()
        self._weights_changed()


def _places(groups: Sequence[Group]) -> dict[int, tuple[int, int]]:
    """Group and first row of each weight, by its number."""
    return {number: (at, row) for at, group in enumerate(groups) for number, row in group.members}
