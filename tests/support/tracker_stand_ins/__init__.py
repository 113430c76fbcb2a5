"""Stand-ins of libraries that the tests' environment has not, for the trainer's tracker process.

Each has what that process calls of mlflow-skinny 3.17 and swanlab 0.10, with which the same calls were tried, and
writes what it was given into the file that `RECORD` names.
"""
