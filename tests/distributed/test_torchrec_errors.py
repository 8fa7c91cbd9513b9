"""Tables, options and versions that recfuse's kernels refuse inside TorchRec, and ranks that fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, EmbeddingLocation
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingStrategy

from recfuse.torchrec import TESTED, EmbeddingBagCollectionSharder, TableBatchedEmbeddingBags
from recfuse.torchrec.kernels import DenseTables
from recfuse.torchrec.options import Options
from support.processes.fresh import run_python
from support.processes.ranks import check, run_cases
from support.torchrec.models import BATCH, ROWS, batch, loss_of, sharded

WAIT = 3.0  # seconds of a process group after both ranks have begun
CACHED = [
    kernel
    for kernel in EmbeddingComputeKernel
    if not kernel.value.startswith(("quant", "custom")) and kernel.value not in ("dense", "fused")
]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(options: dict[str, Any], kernel: str = "fused", tables: int = 1, way: Any = None) -> Any:
    """A collection of tables "the_table 0", ... that one rank shards."""
    configs = [
        EmbeddingBagConfig(name=f"the_table {n}", num_embeddings=10, embedding_dim=8, feature_names=[f"f{n}"])
        for n in range(tables)
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    sharder = EmbeddingBagCollectionSharder(fused_params=options)
    way = table_wise(rank=0, compute_kernel="fused") if way is None else way
    plan = construct_module_sharding_plan(
        collection,
        {config.name: way for config in configs},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    for parameter in plan.values():
        parameter.compute_kernel = kernel
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(collection, plan, env, device=torch.device("cpu"))


@pytest.mark.parametrize("kernel", CACHED, ids=lambda kernel: kernel.name)
def test_compute_kernels_with_a_cache_are_refused(kernel):
    assert {"FUSED_UVM", "FUSED_UVM_CACHING", "KEY_VALUE"} <= {each.name for each in CACHED}
    with pytest.raises(
        ValueError, match=rf"the_table 0 has compute kernel {kernel.name},.*Plan it with FUSED"
    ):
        shard({}, kernel.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": EmbOptimType.LAMB}, r"optimizer is LAMB.*Use one of EXACT_SGD.*ADAM"),
        ({"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM}, r"optimizer is PARTIAL_ROWWISE_ADAM.*EXACT_SGD"),
        ({"gradient_clipping": True}, r"gradient_clipping is True.*own sharder"),
        ({"weight_decay": 0.1}, r"weight_decay is 0.1 with EXACT_SGD.*Set it to 0"),
        ({"output_dtype": SparseType.INT8}, r"output_dtype is INT8.*FP32, FP16 or BF16"),
    ],
    ids=str,
)
def test_an_option_without_a_fused_form_names_the_tables(options, text):
    with pytest.raises(ValueError, match=rf"recfuse.torchrec: tables the_table 0, the_table 1: {text}"):
        shard(options, tables=2)
    many = "tables the_table 0, the_table 1, the_table 2, the_table 3 and 2 others"
    with pytest.raises(ValueError, match=rf"recfuse.torchrec: {many}: {text}"):
        shard(options, tables=6)


def test_a_data_parallel_table_with_int8_output_is_refused():
    with pytest.raises(ValueError, match=r"recfuse.torchrec: table the_table 0: output_dtype is INT8"):
        shard({"output_dtype": SparseType.INT8}, "dense", way=data_parallel())


def test_int8_rows_are_refused():
    place = EmbeddingLocation.HOST, ComputeDevice.CPU
    with pytest.raises(ValueError, match=r"table a: weights_precision is INT8.*Use FP32, FP16 or BF16"):
        TableBatchedEmbeddingBags([(4, 4, *place)], table_names=["a"], weights_precision=SparseType.INT8)


@pytest.mark.parametrize("device", ["mtia", "xpu:1", "mps"])
def test_a_device_without_kernels_is_refused(device):
    place = EmbeddingLocation.DEVICE, ComputeDevice.MTIA
    message = (
        rf"recfuse.torchrec: tables a, b: the device is {device}, .*expected cpu, cuda, meta.*own sharder"
    )
    with pytest.raises(ValueError, match=message):
        TableBatchedEmbeddingBags([(4, 4, *place)] * 2, table_names=["a", "b"], device=device)
    with pytest.raises(ValueError, match=message):
        DenseTables([(4, 4)] * 2, ["a", "b"], [0, 1], Options(), torch.device(device))


def test_fully_sharded_tables_are_refused():
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    env.sharding_strategy = ShardingStrategy.FULLY_SHARDED
    collection = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])]
    )
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        collection,
        {"t": table_wise(rank=0, compute_kernel="fused")},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    with pytest.raises(ValueError, match=r"FULLY_SHARDED is not supported. Use DEFAULT"):
        sharder.shard(collection, plan, env, device=torch.device("cpu"))


IMPORTS = {
    "import sys; sys.modules['torchrec'] = None": "torchrec",
    "import sys; sys.modules['fbgemm_gpu'] = None": "fbgemm_gpu",
    "import torchrec.distributed.embedding_lookup as it; del it.GroupedPooledEmbeddingsLookup": (
        "GroupedPooledEmbeddingsLookup"
    ),
    "import torchrec.distributed.embedding_lookup as it;"
    "del it.GroupedPooledEmbeddingsLookup._create_embedding_kernel": "_create_embedding_kernel",
}


@pytest.mark.long
@pytest.mark.parametrize("before", IMPORTS, ids=list(IMPORTS.values()))
def test_without_torchrec_or_with_another(before):
    code = f"{before}\nimport recfuse.torchrec"
    found = run_python("-c", f"import warnings; warnings.simplefilter('ignore')\n{code}")
    line = found.stderr.strip().splitlines()[-1]
    assert line.startswith("ImportError: recfuse.torchrec: ") and IMPORTS[before] in line
    assert line.endswith(f"tested with torchrec {' and '.join(TESTED)}.")


@pytest.mark.parametrize(("version", "warns"), [("99.1.0", True), (f"{TESTED[0]}+cu130", False)])
def test_an_untested_version_warns(monkeypatch, recwarn, version, warns):
    import recfuse.torchrec as package

    monkeypatch.setattr(package.importlib.metadata, "version", lambda name: version)
    package._warn_of_another_version()
    texts = [str(each.message) for each in recwarn if "torchrec" in str(each.message)]
    assert texts == (
        [f"recfuse.torchrec: torchrec is 99.1.0, which is not tested; expected {' or '.join(TESTED)}"]
        if warns
        else []
    )


def _bad_index() -> tuple[str, str, float]:
    """The second rank looks up a row that its table lacks, and stays; what each rank raises, and when."""
    parallel = sharded("recfuse", "table", EmbOptimType.EXACT_SGD)
    features = batch(0, dist.get_rank())
    loss_of(parallel, features).backward()
    if dist.get_rank() == 0:  # table 1, of features 1 and 2, is on rank 1
        lengths = torch.tensor([0] * BATCH + [0, 1] + [0] * (3 * BATCH - 2))
        features = KeyedJaggedTensor(
            keys=["f0", "f1", "f2", "f3"], values=torch.tensor([ROWS[1]]), lengths=lengths
        )
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=WAIT), dist.group.WORLD)
    begin = time.monotonic()
    try:
        loss_of(parallel, features)
    except Exception as error:
        spent = time.monotonic() - begin
        if isinstance(error, IndexError):
            time.sleep(2 * WAIT)  # keeps its connections, as a rank that handles its error
        return type(error).__name__, str(error), spent
    return "", "", time.monotonic() - begin


@pytest.mark.long
def test_a_rank_that_raises_delays_others_by_the_timeout_at_most():
    results = run_cases(2, _cases)
    (other, _, waited), (kind, text, spent) = check(results, "bad index")
    assert kind == "IndexRangeError" and spent < WAIT
    assert "of rank 1" in text and "feature 0" in text and "bag 1" in text and "t1" in text
    assert other == "RuntimeError" and waited < WAIT + 2


def _cases() -> dict[str, Any]:
    return {"bad index": _bad_index}
