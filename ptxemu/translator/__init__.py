"""Translates PTX to C++: each kernel becomes a function that one fiber runs for one PTX thread (REFERENCE.md)."""
