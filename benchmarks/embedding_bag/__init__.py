"""One large table: recfuse.nn.EmbeddingBag against torch's and FBGEMM's, on five kinds of access.

The setting of Jain et al. (MICRO'24): 500,000 rows of fp32, batch 2048 x 150 lookups, sum pooling, int64
indices; hotness from one row for all lookups to random rows. Candidates run in turns on the same batches with
the same number of threads. FBGEMM's CPU modules use a single thread; each also runs with the bags distributed
over as many threads as the others have, and the fastest of these is the peer "FBGEMM".

With --device cuda: the paper's figures, and a table of torch (eager and compiled), FBGEMM and recfuse on many
tables in turn, with the measured ceilings of the GPU.

All outputs are compared first. Inference mode throughout. Each candidate has its own table, with its default
memory: recfuse on huge pages, torch and FBGEMM on malloc's (all on huge pages with
GLIBC_TUNABLES=glibc.malloc.hugetlb=1).
"""

from common.registry import Benchmark

MODULES = ["flags", "cpu", "random_rows", "main_table", "sweeps", "schemes", "short_bags", "parts"]
bench = Benchmark("embedding_bag", __doc__, MODULES, rounds=21, quick_rounds=5, plots="figure")
