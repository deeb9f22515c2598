"""Degrees, optimizers on the engine and their state, on ranks that are processes over Gloo.

Run with `python tests/python/main.py optimizers_test`; RANKS_VERBOSE=1 shows the time of every check.
"""

import unittest

import degrees_checks
import operation_checks
import option_checks
import ranks
import state_checks


class Optimizers(ranks.Checks):
    def test_two_ranks(self):
        self.on(2, degrees_checks, operation_checks, option_checks, state_checks)

    def test_four_ranks(self):
        self.on(4, degrees_checks, operation_checks, option_checks, state_checks)


if __name__ == "__main__":
    unittest.main()
