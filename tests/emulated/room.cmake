# The command line with the emulator instead of CUDA's run time.
if(NVFP4_MOE_EMULATE AND NVFP4_MOE_WITH_CUDA AND TARGET nvfp4-moe)
  emulated_program(nvfp4-moe nvfp4_moe_cli_verbs nvfp4_moe_cli_bench nvfp4_moe_cli_console)
endif()
