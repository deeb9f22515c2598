"""The Python face on ranks that are processes over Gloo.

Run with `python tests/python/main.py fully_shard_test`; RANKS_VERBOSE=1 shows the time of every check.
"""

import unittest

import case_checks
import feature_checks
import huggingface_checks
import parity_checks
import ranks
from ragged_test import checks_of


class Parity(unittest.TestCase):
    """With torch's own fully_shard."""

    def on(self, size):
        for name, error in ranks.run(checks_of(parity_checks), size).items():
            with self.subTest(check=name, ranks=size):
                self.assertEqual(error, "")

    def test_one_rank(self):
        self.on(1)

    def test_two_ranks(self):
        self.on(2)

    def test_four_ranks(self):
        self.on(4)


class Face(unittest.TestCase):
    def on(self, size, modules):
        for name, error in ranks.run([c for m in modules for c in checks_of(m)], size).items():
            with self.subTest(check=name, ranks=size):
                self.assertEqual(error, "")

    def test_two_ranks(self):
        self.on(2, (case_checks, feature_checks, huggingface_checks))

    def test_four_ranks(self):
        self.on(4, (case_checks,))


if __name__ == "__main__":
    unittest.main()
