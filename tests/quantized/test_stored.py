"""fused_embedding_bag_quantized with `stored`: tables within memory that they share, of any pitch."""

from __future__ import annotations

import pytest
import torch

import recfuse
from support.tables.stored import call, in_memory

KINDS = ("int8", "int4", "float16", "float32", "bfloat16")


@pytest.mark.parametrize("alignment", (1, 2, 4, 16, 64))
@pytest.mark.parametrize("behind", (False, True))
def test_agrees_with_float64(alignment, behind):
    tables = [(rows, dim, kind) for rows, dim in ((9, 6), (40, 32), (1, 10), (21, 130)) for kind in KINDS]
    memory, rows, problem = in_memory(tables, alignment, behind)
    for integer in (torch.int32, torch.int64):
        lookups = problem.lookups(5, integer=integer)
        got = call(memory, rows, problem, lookups)
        problem.compare(got, problem.reference(*lookups), *lookups, None)
    factors = torch.rand(lookups[0].numel())
    got = call(memory, rows, problem, lookups, factors)
    problem.compare(got, problem.reference(*lookups, factors), *lookups, factors)


def test_tables_without_rows_and_a_table_within_a_table():
    memory, rows, problem = in_memory([(0, 6, "int8"), (40, 8, "float16")], 32)
    features = problem.rows.clone()
    features[1] = torch.tensor([1, 30 * 8, 10, 8, 0, -1, 6])  # its last ten rows
    got = recfuse.ops.fused_embedding_bag_quantized(
        [memory], [memory], features, torch.tensor([9]), torch.tensor([0, 0, 1]), 14, stored=rows
    )
    assert torch.equal(got[0, 6:].double(), problem.tables[1].values[39])
    assert not got[0, :6].any()


def refused(match, change, tables=((9, 6, "int8"), (9, 6, "float32")), error=ValueError, **options):
    memory, rows, problem = in_memory(list(tables), 16)
    lookups = problem.lookups(2)
    call(memory, rows, problem, lookups)
    change(rows)
    with pytest.raises(error, match=match):
        call(memory, rows, problem, lookups, **options)


def setting(table, field, value):
    def change(rows):
        rows[table, field] = value

    return change


def test_bad_tables():
    refused(r"stored\[0\] is in weights\[1\]; expected one of 1 weights", setting(0, 0, 1))
    refused(r"stored\[1\] is in weights\[-1\]", setting(1, 0, -1))
    for value in (-1, 2**62, 10**6):
        refused(r"stored\[0\] has 9 rows of 6 bytes, 16 apart, from byte", setting(0, 1, value))
    for value in (-5, 10**6, 2**62):
        refused(rf"stored\[0\] has {value} (rows|x 6)", setting(0, 2, value))
    refused(r"stored\[0\] has -6 columns; expected 0 or more", setting(0, 3, -6))
    refused(r"of int4 an even number", setting(0, 3, 5), tables=((9, 6, "int4"),))
    for value in (-1, 3, 6):
        refused(r"stored\[0\] has rf_dtype", setting(0, 4, value), error=TypeError)
    for value in (5, -16, 2**61):
        refused(r"stored\[0\] has 9 rows of 6 bytes", setting(0, 5, value))
    for value in (-1, 10**6):
        refused(r"stored\[0\] has parameters of 4 bytes, 16 apart, from byte", setting(0, 6, value))
    refused(r"stored\[0\] has parameters of rf_dtype 2", setting(0, 7, 2), error=TypeError)
    refused(
        r"stored\[1\] has floats at byte \d+, 27 bytes apart; expected multiples of the 4", setting(1, 5, 27)
    )
    refused("is a table of 9 x 6 at element 0", setting(1, 2, 8))
    refused(r"expected whole rows of weights\[1\], which has 5 columns", setting(1, 3, 5))


def test_bad_arguments():
    memory, rows, problem = in_memory([(9, 6, "int8")], 16)
    lookups = problem.lookups(2)

    def run(weights, parameters, stored):
        return recfuse.ops.fused_embedding_bag_quantized(
            weights, parameters, problem.rows, *lookups, problem.output_dim, stored=stored
        )

    run([memory], [memory], rows)
    with pytest.raises(ValueError, match="parameters has 0 tensors; expected as many as the 1 weights"):
        run([memory], [], rows)
    expected = run([memory], [memory], rows)
    assert torch.equal(run([memory], [memory.clone()], rows), expected)
    with pytest.raises(ValueError, match=r"within the 100 bytes of parameters\[0\]"):
        run([memory], [memory[:100]], rows)
    with pytest.raises(ValueError, match=r"weights is int8 .* expected contiguous uint8 with stored"):
        run([memory.view(torch.int8)], [memory], rows)
    with pytest.raises(ValueError, match=r"parameters is uint8 .* expected contiguous uint8"):
        run([memory], [memory[::2]], rows)
    with pytest.raises(ValueError, match=r"stored is int64 \[1, 7\]; expected int64 \[tables, 8\]"):
        run([memory], [memory], rows[:, :7])
    with pytest.raises(ValueError, match="stored is int32"):
        run([memory], [memory], rows.int())
    torch.library.opcheck(
        torch.ops.recfuse.fused_embedding_bag_quantized,
        ([memory], [memory], problem.rows, *lookups, problem.output_dim),
        {"stored": rows},
    )
