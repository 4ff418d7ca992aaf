"""`propolis bench`: how fast an engine is here and now, beside the least that any queue must do on it.

figures      the values that come out, and their statistics
target       where to measure without touching anybody's jobs: a file for each engine, on_<engine>,
             with the raw loop, the least that a queue with leases must do there
tasks        the jobs that are measured
serving      a worker in a process of its own
measures     what is measured, step by step
"""
