"""Tables of int8 and int4 rows: the benchmark in the folder quantised."""

from quantised import bench

if __name__ == "__main__":
    bench.main()
