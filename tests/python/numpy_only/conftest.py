"""The tests of this folder need NumPy and pytest alone, and skip nothing: test_wheel.py runs them once more where only
these are installed, against the wheel. A test that wants torch or another oracle belongs one folder up.
"""
