"""A plugin of pytest that appends the outcome of each test to a file as it is known: the records of the contract."""

import json
import os

import pytest

FILE = "LINBIAS_OUTCOMES"  # the environment variable that names the file


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        stage, test = os.environ["LINBIAS_STAGE"], report.nodeid.rpartition("::")[2]
        line = {"case": stage, "test": test, "outcome": report.outcome}
        with open(os.environ[FILE], "a") as file:
            file.write(json.dumps(line) + "\n")
