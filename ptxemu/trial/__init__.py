"""Tests of the emulator against the PTX specification, through the CUDA interface that programs use."""
