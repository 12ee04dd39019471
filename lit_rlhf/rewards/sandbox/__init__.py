"""Run a program that nobody trusts, and the tests that judge it, inside limits that it cannot lift.

``runner`` starts one ``supervisor`` process per program. That one shuts itself and its children in (``confinement``)
and starts two processes: ``program`` runs what the model wrote, ``judge`` runs the tests. The judge calls the program's
functions over a socket, and gets plain data back (``wire``). So the program never sees the expected values, cannot
exit the judge, replace what ``==`` means or write a report of its own.
"""
