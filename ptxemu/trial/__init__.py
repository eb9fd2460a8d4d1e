"""The emulator on trial: what it does against what PTX says, through the CUDA interface that programs use."""
