"""Models of four styles, for any batch: as many columns, bags and broadcasts are found as were built."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recfuse
from support.dlrm import DLRM_Net, batch_of
from support.graphs import assert_same, jagged

pytestmark = pytest.mark.long

COLUMNS, BAGS = "columns", "bags"
USERS, DIM = 4, 8


class Plain(nn.Module):
    """A ranking model written as modules: columns and bags of candidates, and users copied to them."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, DIM) for _ in range(6))
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, DIM, mode=mode) for mode in ("sum", "mean", "max"))
        self.tower = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.LayerNorm(DIM))
        self.compression = nn.Linear(DIM + 9 * DIM, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.gate = nn.Linear(DIM, DIM)

    def forward(self, floats, integers, values, offsets, users, history, of):
        boundaries = torch.tensor([-1.0, 0.0, 0.5])
        found = [table(torch.bucketize(floats[:, k], boundaries)) for k, table in enumerate(self.tables[:3])]
        found += [table(integers[:, k] % 20) for k, table in enumerate(self.tables[3:])]
        found += [bag(integers % 20) if k else bag(values, offsets) for k, bag in enumerate(self.bags)]
        users = self.tower(users)
        mixed = self.compression(torch.cat([users[of], *found], 1))
        history = history[of]
        attended, _ = self.attention(mixed.unsqueeze(1), history, history, need_weights=False)
        return attended.squeeze(1) * self.gate(users[of]).sigmoid()

    def batch(self, samples):
        values, offsets = jagged(samples, 20)
        return (
            torch.randn(samples, 3), torch.randint(0, 10**6, (samples, 3)), values, offsets,
            torch.randn(USERS, DIM), torch.randn(USERS, 5, DIM), torch.randint(0, USERS, (samples,)),
        )  # fmt: skip

    def dynamic(self, batch):
        any_number = torch.export.Dim.AUTO
        return (
            {0: batch},
            {0: batch},
            {0: any_number},
            {0: batch},
            {0: any_number},
            {0: any_number},
            {0: batch},
        )


class Dlrm(DLRM_Net):
    """facebookresearch/dlrm's, with its dot interaction; users' bottom layer is copied to candidates."""

    def __init__(self):
        super().__init__(sizes=range(10, 36), sparse=False)
        self.top_l = nn.Linear(27 * 26 // 2 + 8, 1)

    def forward(self, dense_x, lS_o, lS_i, of):
        x = self.bot_l(dense_x[of])
        T = torch.cat([x, *self.apply_emb(lS_o, lS_i, self.emb_l, self.v_W_l)], 1).view(x.shape[0], -1, 8)
        Z = torch.bmm(T, T.transpose(1, 2))
        li, lj = torch.tril_indices(27, 27, offset=-1)
        return self.top_l(torch.cat([x, Z[:, li, lj]], 1))

    def batch(self, samples):
        _, offsets, indices = batch_of(self, samples, form="list")
        return torch.randn(USERS, 5), offsets, indices, torch.randint(0, USERS, (samples,))

    def dynamic(self, batch):
        any_number = torch.export.Dim.AUTO
        return {0: any_number}, [{0: batch}] * 26, [{0: any_number}] * 26, {0: batch}


class FeatureColumns(nn.Module):
    """A list of columns, each by its own configuration, over a dictionary of features: every pair once."""

    def __init__(self, columns=60):
        super().__init__()
        kinds = ("bucketized", "hashed", "identity", "default", "tags", "weighted")
        self.config = [(f"c{k}", kinds[k % 6], 11 + k % 5) for k in range(columns)]
        self.tables = nn.ModuleDict({name: nn.Embedding(rows, 4) for name, _, rows in self.config})

    def forward(self, features):
        found = []
        for number, (name, kind, rows) in enumerate(self.config):
            table, value = self.tables[name], features[f"f{number % 12}"]
            if kind == "bucketized":
                boundaries = torch.tensor([0.1 * step for step in range(rows - 1)])
                found.append(table(torch.bucketize(value * 0.5, boundaries)))
            elif kind == "hashed":
                found.append(table((value % rows).clamp(0, rows - 1)))
            elif kind == "identity":
                found.append(table(value.clamp(0, rows - 1)))
            elif kind == "default":
                index = torch.where(value < rows, value, -1)
                rows_of = table(index.clamp(min=0))
                found.append(torch.where((index >= 0).unsqueeze(1), rows_of, 0.0))
            else:
                values, offsets, weights = value
                given = weights if kind == "weighted" else None
                found.append(
                    F.embedding_bag(
                        values % rows, table.weight, offsets, mode="sum", include_last_offset=True,
                        per_sample_weights=given,
                    )
                )  # fmt: skip
        return torch.cat(found, 1)

    def batch(self, samples):
        features = {}
        for number in range(12):
            kind = self.config[number][1]
            if kind in ("tags", "weighted"):
                values, offsets = jagged(samples, 10**6, last=True)
                features[f"f{number}"] = (values, offsets, torch.rand(values.numel()))
            elif kind == "bucketized":
                features[f"f{number}"] = torch.randn(samples)
            else:
                features[f"f{number}"] = torch.randint(0, 10**6, (samples,))
        return (features,)

    def dynamic(self, batch):
        any_number = {0: torch.export.Dim.AUTO}
        features = self.batch(2)[0]
        return (
            {
                name: (any_number, any_number, any_number) if isinstance(given, tuple) else any_number
                for name, given in features.items()
            },
        )


class TorchRec(nn.Module):
    """TorchRec's collection over a KeyedJaggedTensor, and its dense part of users."""

    def __init__(self):
        super().__init__()
        torchrec = pytest.importorskip("torchrec")
        configs = [
            torchrec.EmbeddingBagConfig(
                name=f"t{k}", embedding_dim=8, num_embeddings=50, feature_names=[f"f{2 * k}", f"f{2 * k + 1}"]
            )
            for k in range(6)
        ]
        self.keys = [f"f{k}" for k in range(12)]
        self.collection = torchrec.EmbeddingBagCollection(tables=configs)
        self.dense, self.top = nn.Linear(5, 8), nn.Linear(13 * 8, 1)

    def forward(self, users, of, lengths, values):
        import torchrec

        given = torchrec.KeyedJaggedTensor(keys=self.keys, values=values, lengths=lengths)
        pooled = self.collection(given).values()
        return self.top(torch.cat([self.dense(users[of]).relu(), pooled], 1))

    def batch(self, samples):
        lengths = torch.randint(0, 4, (12 * samples,))
        values = torch.randint(0, 50, (int(lengths.sum()),))
        return torch.randn(USERS, 5), torch.randint(0, USERS, (samples,)), lengths, values


FOUND = {
    Plain: {COLUMNS: 9, BAGS: 0, "ikbo_linear": 1, "ikbo_attention": 1, "late_gather": 1},
    Dlrm: {COLUMNS: 0, BAGS: 26, "ikbo_linear": 1, "late_gather": 1},
    FeatureColumns: {COLUMNS: 60, BAGS: 0},
    TorchRec: {COLUMNS: 0, BAGS: 12, "ikbo_linear": 1, "late_gather": 0},
}


def found_in(reports, model):
    """Returns the matches of each kind of the style, and the refusals of any kind."""
    found = {kind: sum(len(report.found(kind)) for report in reports) for kind in FOUND[type(model)]}
    return found, [entry for report in reports for entry in report.left]


@pytest.mark.parametrize("style", (Plain, Dlrm, FeatureColumns))
def test_compiled_once_for_any_batch(style):
    model = style().requires_grad_(False).eval()
    torch.compiler.reset()
    backend = recfuse.backend("eager")
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    once = torch._dynamo.config.patch(error_on_recompile=True)
    # Else torch takes two sizes for one because they are equal in the first batch.
    with once, torch.fx.experimental._config.patch(use_duck_shape=False), torch.no_grad():
        for samples in (32, 256, 2048):
            batch = model.batch(samples)
            assert_same(compiled(*copy.deepcopy(batch)), model(*batch))
    assert found_in(backend.reports, model) == (FOUND[type(model)], [])


def test_torchrec_is_compiled_as_often_as_without_the_pass():
    model = TorchRec().requires_grad_(False).eval()
    batches = [model.batch(samples) for samples in (32, 256, 2048)]
    counts = []
    for backend in (torch._dynamo.testing.CompileCounter(), recfuse.backend("eager")):
        torch.compiler.reset()
        compiled = torch.compile(model, backend=backend, dynamic=True)
        with torch.no_grad():
            for number, batch in enumerate(batches):
                assert_same(compiled(*copy.deepcopy(batch)), model(*batch))
                if number == 0 and isinstance(backend, recfuse.passes.graph.compiling.Backend):
                    assert found_in(backend.reports, model) == (FOUND[type(model)], [])
        counts.append(getattr(backend, "frame_count", None) or len(backend.reports))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("style", (Plain, Dlrm, FeatureColumns))
def test_exported_for_any_batch(style):
    model = style().requires_grad_(False).eval()
    batch = torch.export.Dim("batch", min=2, max=1 << 16)
    program = torch.export.export(model, model.batch(32), dynamic_shapes=model.dynamic(batch))
    report = recfuse.swap(program, check=[model.batch(7)])
    assert found_in([report], model) == (FOUND[type(model)], [])
    for samples in (2, 50, 2048):
        batch = model.batch(samples)
        assert_same(program.module()(*batch), model(*batch))
