"""Runs the test modules that are named, and writes their count where GTEST_OUTPUT says, as the C++ tests do.

usage: python tests/python/main.py MODULE...
"""

import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


def main(names):
    sys.path.insert(0, HERE)
    suite = unittest.defaultTestLoader.loadTestsFromNames(names)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    wrong = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    target = os.environ.get("GTEST_OUTPUT", "")
    if target.startswith("xml:"):
        with open(os.path.join(target[4:], f"python_{names[0]}.xml"), "w") as report:
            report.write(f'<testsuites tests="{result.testsRun}" failures="{wrong}">\n')
            report.writelines("<skipped/>\n" for _ in result.skipped)
            report.write("</testsuites>\n")
    return 1 if wrong or not result.testsRun else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
