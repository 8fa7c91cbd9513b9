"""`recfuse predict`: predicts the time and memory of a model's step on a GPU, and calibrates a GPU."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recfuse.cli.calls import quantity

if TYPE_CHECKING:
    from recfuse.perf.calibration import Calibration
    from recfuse.perf.prediction import Prediction

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_MOST_SPREAD = 5.0


def duration(text: str) -> float:
    """Return seconds of a text such as "5ms"."""
    return quantity(text, _UNITS, "duration", "5ms, 800us or 1s")


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "predict",
        help="predict the time and memory of a step of a model on a GPU, without running the step",
        description="Calls FUNCTION(batch), which returns (model, inputs). With --training it may return a "
        "function without arguments that runs a training step. Prints the predicted time of the step in "
        "eager mode, compiled and as a CUDA graph, and the peak memory. Needs no GPU, and large new tensors "
        "take no memory. In Python: recfuse.predict(model, inputs, gpu=...).",
    )
    add = parser.add_argument
    add(
        "make",
        nargs="?",
        metavar="FILE:FUNCTION",
        help="the function, such as model.py:make or package.module:make",
    )
    add("--batch", nargs="+", type=int, default=[2048], help="batch sizes (default: 2048)")
    gpus = "names of GPUs, or cpu (default: the GPU of this machine, or H100 without a GPU)"
    add("--gpu", nargs="+", help=gpus)
    training = "predict a training step: FUNCTION returns the step, or a model to train and its inputs"
    add("--training", action="store_true", help=training)
    add("--swap", action="store_true", help="predict also the model after recfuse.swap")
    add("--slo", type=duration, metavar="TIME", help="find the largest batch within a latency, such as 5ms")
    calibration = "calibration of the GPU (default: from the cache, or from the package)"
    add("--calibration", metavar="FILE", help=calibration)
    add("--measure", action="store_true", help="measure the kernels of this model on this machine first")
    add("--output", metavar="FILE", help="write the calibration with the measurements of --measure")
    add("--json", metavar="FILE", help="write the predictions to this file")
    add("--trace", metavar="FILE", help="write the last prediction as a trace for Perfetto")
    add("--recorded", metavar="FILE", help="add the events of this torch.profiler trace to --trace")
    add("--beside", metavar="FILE", help="deprecated name of --recorded")
    add("--plot", metavar="FILE", help="draw the last prediction (needs matplotlib)")
    add("--calibrate", action="store_true", help="calibrate the device; predicts nothing")
    device = "device of --calibrate and --measure: cuda or cpu (default: cuda if available)"
    add("--device", help=device)
    add("--seconds", type=float, default=180.0, help="time limit of --calibrate (default: 180)")
    add("--force", action="store_true", help="keep the calibration of a device that was busy")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Predict, or calibrate."""
    from recfuse.perf.calibrating.of_step import with_points

    if arguments.calibrate:
        return _calibrate(arguments)
    if not arguments.make:
        raise ValueError("FILE:FUNCTION is missing. Pass a function such as model.py:make, or --calibrate.")
    if min(arguments.batch) < 1:
        raise ValueError(f"--batch is {min(arguments.batch)}; expected >= 1")
    make = load_function(arguments.make)
    gpus = arguments.gpu or [None]
    if arguments.measure:
        gpus = _gpus_to_measure(arguments)
    elif arguments.output:
        raise ValueError("--output is given without --measure, whose points it writes. Pass --measure.")
    records: list[dict[str, Any]] = []
    last: Prediction | None = None
    points: Calibration | None = None
    for gpu in gpus:
        for batch in arguments.batch:
            last, *after = _predict(arguments, make, gpu, batch, records)
            for prediction in (last, *after):
                if prediction.measured is not None:
                    points = (
                        prediction.measured if points is None else with_points(points, prediction.measured)
                    )
                    arguments.calibration = prediction.calibration
        if arguments.slo:
            _largest(arguments, make, gpu, records)
    if last is not None:
        _write(arguments, last, records)
    if arguments.output and last is not None and points is not None:
        _save(arguments.output, arguments.calibration, points)
    return 0


def _gpus_to_measure(arguments: argparse.Namespace) -> list[str | None]:
    """Return the name of the device to measure, for `recfuse.predict`."""
    if arguments.gpu and len(arguments.gpu) > 1:
        raise ValueError(f"--measure measures one device, and --gpu names {len(arguments.gpu)}")
    gpu = arguments.gpu[0] if arguments.gpu else None
    if (arguments.device or _default_device()) == "cpu":
        if gpu not in (None, "cpu"):
            raise ValueError(f"--measure: --gpu is {gpu!r}, and the device here is the CPU; expected cpu")
        return ["cpu"]
    return [gpu]


def _save(path: str, calibration: Calibration, points: Calibration) -> None:
    """Write the calibration with the measured points, or these alone if it is of another GPU or torch."""
    if not calibration.source and calibration.torch == points.torch:
        points = calibration
    points.save(path)
    print(f"{points!r} written to {path}", file=sys.stderr)


def load_function(text: str) -> Callable[[int], Any]:
    """Return the function that "FILE:FUNCTION" names.

    Raises ValueError if there is no such file, module or function.
    """
    source, separator, name = text.rpartition(":")
    if not separator or not source or not name:
        raise ValueError(f"{text!r} is no FILE:FUNCTION; expected a text such as model.py:make")
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"{source} is no file")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.resolve().parent))
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise ValueError(f"no module {source!r}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(
            f"{source} has no function {name!r}; expected a function that takes a batch and returns (model, "
            "inputs)"
        )
    return function  # type: ignore[no-any-return]


def made(make: Callable[[int], Any], batch: int, training: bool) -> tuple[Any, Any]:
    """Return the model and its inputs for a batch; the inputs of a step without arguments are None."""
    from recfuse.perf.tracing.unallocated import unallocated

    with unallocated():
        model = make(batch)
    if isinstance(model, tuple) and len(model) == 2:
        return model
    if callable(model) and training:
        return model, None
    raise ValueError(
        f"make({batch}) returns a {type(model).__name__}; expected (model, inputs), or with --training a "
        "step without arguments"
    )


def _predict(
    arguments: argparse.Namespace, make: Callable[[int], Any], gpu: str | None, batch: int, records: list[Any]
) -> list[Prediction]:
    """Return the prediction of the model, and with --swap that of the swapped model."""
    from recfuse.perf.gain import Gain
    from recfuse.perf.predict import predict

    model, inputs = made(make, batch, arguments.training)
    calibration = arguments.calibration
    options = {"gpu": gpu, "training": arguments.training, "measure": arguments.measure}
    prediction = predict(model, inputs, calibration=calibration, **options)
    print(f"batch {batch}: {prediction}\n")
    records.append({"batch": batch, **prediction.to_json()})
    if not arguments.swap:
        return [prediction]
    swapped = _swapped(model)
    calibration = prediction.calibration if arguments.measure else calibration
    after = predict(swapped, inputs, calibration=calibration, **options)
    print(f"after recfuse.swap, {Gain(prediction, after)}\n")
    records.append({"batch": batch, "swapped": True, **after.to_json()})
    return [prediction, after]


def _swapped(model: Any) -> Any:
    """Apply `recfuse.swap` to the model in place; each call of make creates a new model."""
    import torch

    from recfuse.passes.swap import swap
    from recfuse.perf.tracing.unallocated import unallocated

    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            "--swap needs a model that make returns as (model, inputs), and a step hides its model"
        )
    with unallocated():
        print(swap(model))
    return model


def _largest(
    arguments: argparse.Namespace, make: Callable[[int], Any], gpu: str | None, records: list[Any]
) -> None:
    from recfuse.perf.capacity import largest_batches
    from recfuse.perf.predict import predict

    def at(batch: int) -> Prediction:
        model, inputs = made(make, batch, arguments.training)
        return predict(model, inputs, gpu=gpu, training=arguments.training, calibration=arguments.calibration)

    print(f"largest batch under {arguments.slo * 1e3:g} ms:")
    for capacity in largest_batches(at, arguments.slo):
        batch = f"{capacity.batch:>9,}" if capacity.batch else "     none"
        print(f"  {capacity.regime:<9} {batch}  {capacity.seconds * 1e3:.4g} ms, limited by {capacity.by}")
        records.append({"slo_seconds": arguments.slo, "regime": capacity.regime, "batch": capacity.batch,
                        "seconds": capacity.seconds, "by": capacity.by})  # fmt: skip


def _write(arguments: argparse.Namespace, last: Prediction, records: list[Any]) -> None:
    if arguments.json:
        from recfuse._files import write_json

        write_json(arguments.json, records, "recfuse predict")
    if arguments.trace:
        if arguments.beside:
            print("warning: --beside is a deprecated name. Use --recorded.", file=sys.stderr)
        last.save_trace(arguments.trace, arguments.recorded or arguments.beside)
    if arguments.plot:
        last.plot().savefig(arguments.plot, dpi=150)
    for name in ("json", "trace", "plot"):
        if path := getattr(arguments, name):
            print(f"written to {path}", file=sys.stderr)


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _calibrate(arguments: argparse.Namespace) -> int:
    import torch

    from recfuse.perf.calibrating.run import Calibrator
    from recfuse.perf.calibration import cache_folder
    from recfuse.perf.choosing import path_of_new
    from recfuse.perf.known import name_here

    device = arguments.device or _default_device()
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device is {device!r}, but torch {torch.__version__} finds no CUDA device here")
    if device != "cpu" and not device.startswith("cuda"):
        raise ValueError(f"--device is {device!r}; expected cpu or cuda")
    default = path_of_new(name_here(torch.device(device)), cache_folder())
    path = Path(arguments.calibration or default)
    calibrator = Calibrator(device, path, seconds=arguments.seconds)
    calibration = calibrator.run()
    missing = [group for group in calibrator.plan() if group not in calibration.groups]
    print(f"{calibration!r}: {json.dumps(calibration.facts)}")
    return _report(calibration, path, missing, arguments.force)


def _report(calibration: Calibration, path: Path, missing: list[str], force: bool) -> int:
    """Print the path of a calibration, and remove the calibration of a device that was too noisy."""
    spread = float(calibration.facts.get("spread", 0.0))
    if missing:
        print(f"not measured yet: {', '.join(missing)}; the same command goes on", file=sys.stderr)
    if spread > _MOST_SPREAD:
        reason = f"points differ by {spread:.1f} % between rounds, more than {_MOST_SPREAD:g} %"
        print(f"{reason}: another process uses the device", file=sys.stderr)
        if not force:
            path.unlink(missing_ok=True)
            print("not kept; --force keeps it", file=sys.stderr)
            return 1
    print(f"written to {path}")
    return 0
