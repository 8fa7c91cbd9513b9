"""`recfuse.predict`: predicts the time and memory of a step on a GPU, without running it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recfuse._arguments import wrong_type
from recfuse.errors import ArgumentValueError
from recfuse.perf.calibrating.of_step import measure_calls, with_points
from recfuse.perf.calibration import Calibration
from recfuse.perf.choosing import Chosen, choose
from recfuse.perf.known import gpu_names, name_here
from recfuse.perf.models.regimes import (
    Estimate,
    active_spread,
    active_us,
    compiled_times,
    eager,
    graph_us,
    timed,
)
from recfuse.perf.prediction import Prediction, outside_note, unknown_note
from recfuse.perf.tracing.kept_state import KeptState
from recfuse.perf.tracing.memory import workspace_bytes
from recfuse.perf.tracing.operators import Operator
from recfuse.perf.tracing.recorded_calls import CallRecorder
from recfuse.perf.tracing.tracer import Tracer, run_traced

_COMPILED_SPREAD, _GRAPH_SPREAD = 0.12, 0.03
_OTHER_HOST = 0.2  # machines with the same GPU have different hosts


def predict(
    model: Any,
    inputs: Any = None,
    *,
    gpu: str | None = None,
    training: bool = False,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    measure: bool = False,
) -> Prediction:
    """Return the time and memory that a step will take on a GPU, without running it and without a GPU.

    The step is traced: floating-point tensors have no memory, integers are real, so that the lookups of the
    batch are known. Weights, gradients, states of optimizers and the random state do not change.

    Args:
        model: a module, an exported program, or any callable: a step without arguments.
        inputs: arguments of ``model``: a tuple, a dict by name, or a single value. None: no arguments.
        gpu: a GPU by its name, such as ``"H100"``, or ``"cpu"``. Default: the GPU of this machine, else H100.
        training: the step trains. A module is then called forward and backward from the sum of its results; a
            callable does its own backward pass and optimizer step.
        calibration: a calibration, or its file. Default: the calibration of the GPU and of this torch, from
            the cache or as shipped.
        measure: measure the kernels of this step on the device of this machine, each size once, on random
            tensors. Ctrl-C keeps the measured sizes and predicts the others. ``gpu`` must be this machine's.

    Returns:
        Prediction: time in each regime, peak memory, and the operators.

    Raises:
        ValueError: an unknown GPU, no calibration, a GPU to measure that is not here, or a step that reads
            the value of a floating-point tensor or dispatches nothing.
        TypeError: ``model`` cannot be called.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(1_000_000, 64, mode="sum")
        >>> indices, offsets = torch.randint(1_000_000, (4096,)), torch.arange(0, 4096, 8)
        >>> print(recfuse.predict(table, (indices, offsets), gpu="H100"))  # doctest: +SKIP

    Source: Lin et al., "Building a Performance Model for Deep Learning Recommendation Model Training on
    GPUs", 2022.
    """
    chosen, points = choose(gpu, calibration, may_be_empty=measure), None
    if measure:
        device, recorder = _device_of(chosen.calibration.gpu), CallRecorder()
        operators_of(model, inputs, chosen.calibration, training, recorder)
        measurement = measure_calls(device, recorder.calls.values())
        points = measurement.points
        merged = with_points(chosen.calibration, points)
        chosen = replace(chosen, calibration=merged, notes=(*chosen.notes, measurement.note()))
    operators, peak, resident, unknown = operators_of(model, inputs, chosen.calibration, training)
    prediction = from_operators(operators, chosen, training, peak, resident, unknown)
    return prediction if points is None else replace(prediction, measured=points)


def _device_of(gpu: str) -> str:
    """Return the device of this machine by its name in torch, if it is the GPU that is to be measured."""
    if gpu == "cpu":
        return "cpu"
    device = name_here(torch.device("cuda")) if torch.cuda.is_available() else "no GPU"
    if device != gpu:
        raise ArgumentValueError(
            f"recfuse.predict: measure is True and gpu is {gpu}, but this machine has {device}; expected the "
            "GPU of this machine, or cpu. Use a machine with that GPU."
        )
    return "cuda"


def operators_of(
    model: Any, inputs: Any, calibration: Calibration, training: bool, recorder: CallRecorder | None = None
) -> tuple[list[Operator], int, int, bool]:
    """Return the operators of a step, its peak and resident bytes, and whether indices were unknown.

    With ``recorder``, the calls are recorded. It keeps tensors, so that the bytes are too many.
    """
    call, module = _call_of(model, inputs, training)
    lowered = calibration.gpu if calibration.gpu in gpu_names() else None
    tracer = Tracer(lowered, training, KeptState(foreach=not calibration.is_cpu))
    tracer.recorder = recorder
    operators, memory = run_traced(tracer, call, module)
    if not any(operator.kind for operator in operators):
        raise ArgumentValueError(
            "recfuse.predict: the step launches no kernel; expected a step that computes with torch's "
            "operators on a batch that is not empty"
        )
    idle = sum(
        tensor.numel() * tensor.element_size() for tensor in _tensors_of(module) if not memory.used(tensor)
    )
    peak = memory.peak + idle + workspace_bytes(operators, lowered)
    return operators, peak, memory.resident + idle, tracer.rows.unknown


def _tensors_of(module: Any) -> Iterator[Tensor]:
    if isinstance(module, nn.Module):
        yield from module.parameters()
        yield from module.buffers()


def _call_of(model: Any, inputs: Any, training: bool) -> tuple[Callable[[], Any], Any]:
    """Return a call without arguments, and the module whose paths name its operators."""
    if hasattr(model, "graph_signature") and hasattr(model, "module"):  # an exported program
        model = model.module()
    if not callable(model):
        raise wrong_type("recfuse.predict: model", model, "a module, an exported program or a callable")
    args, kwargs = _arguments(inputs)

    def call() -> Any:
        if isinstance(model, nn.Module) and training:
            with torch.enable_grad():
                results = [output for output in _floats(model(*args, **kwargs)) if output.requires_grad]
                if results:
                    torch.autograd.backward([output.float().sum() for output in results])
            return None
        with torch.set_grad_enabled(training):
            return model(*args, **kwargs)

    return call, model if isinstance(model, nn.Module) else None


def _arguments(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if inputs is None:
        return (), {}
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs, {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _floats(item)
    elif callable(getattr(value, "values", None)):
        yield from _floats(value.values())


def from_operators(
    operators: Sequence[Operator], chosen: Chosen, training: bool, peak: int = 0, resident: int = 0,
    unknown_indices: bool = False, exact: bool = True,
) -> Prediction:  # fmt: skip
    """Return the prediction of a list of operators; not ``exact``: measured points of the same
    sizes are not used.
    """
    calibration = chosen.calibration
    gaps, host = calibration.gaps, calibration.host
    times = timed(operators, calibration.kernels, host, exact)
    call_us = host.us("(call)", "forward" if training else "inference")
    kernels_spread = math.hypot(active_spread(times), chosen.spread)
    host_us = call_us + sum(timed.host_us for timed in times)
    host_spread = math.hypot(host.spread["training" if training else "inference"], chosen.spread)
    active = active_us(times)
    compiled = graph = None
    if not calibration.is_cpu:
        host_spread = math.hypot(host_spread, _OTHER_HOST)
    if calibration.is_cpu:
        total = host_us + active
        spread = math.hypot(host_spread * host_us, kernels_spread * active) / max(total, 1e-9)
        step = Estimate.of(total, spread)
    else:
        span, times = eager(times, gaps, call_us)
        step = Estimate.of(span, host_spread if host_us > active else kernels_spread)
        fused = compiled_times(operators, calibration.kernels, gaps)
        compiled_us, _ = eager(fused, gaps, gaps.compiled_call)
        compiled = Estimate.of(compiled_us, math.hypot(kernels_spread, _COMPILED_SPREAD))
        graph = Estimate.of(graph_us(times, gaps), math.hypot(kernels_spread, _GRAPH_SPREAD))
    notes = [*chosen.notes]
    if unknown_indices:
        notes.append("indices are unknown: taken as uniform over the rows")
    notes += filter(None, (outside_note(times), unknown_note(times)))
    return Prediction(
        calibration.gpu, calibration.torch, training, step, compiled, graph,
        Estimate.of(active, kernels_spread), host_us * 1e-6, sum(timed.kernel.kernels for timed in times),
        peak, resident, int(calibration.facts.get("memory_bytes", 0)) if not calibration.source else 0,
        times, tuple(notes), calibration,
    )  # fmt: skip
