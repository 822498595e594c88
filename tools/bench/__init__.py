"""The parts of tools/bench_train.py: what is compared, both sides, how ranks are started and measured, the tables."""
