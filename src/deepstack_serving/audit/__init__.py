"""`deepstack audit`: shows that the visual features of a running server reach its answers, in graphs and without.

A run's way: cases (what is asked), arms (under which conditions), asking, comparison of two answers, verdict, report.
"""
