// Copies a checkpoint's other content to a new directory, byte for byte.
//
// A symbolic link is copied as its target, and only if the target is inside the model: below its
// folder, or, in Hugging Face's cache (REPOSITORY/snapshots/REVISION/x -> ../../blobs/HASH), in the
// repository's blobs. A link out of the model would put a file of this machine, for example its
// passwords, into published files.
#pragma once

#include <string>
#include <vector>

#include "core/status.h"
#include "safetensors/safetensors.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe::internal {

// kInvalidArgument if OUT is IN, or one contains the other.
Status check_apart(const std::string& in, const std::string& out);

// Streams one tensor, 16 MiB at a time. kIo if its file was truncated or written to.
Status copy_tensor(const TensorIndex::Ref& from, ShardedWriter& writer);

struct OtherFile {
  std::string name;  // relative to the model
  std::string from;  // the path to read: links resolved
};
// Lists every file of IN by name, with subdirectories. Leaves out weights, their index, configs
// that the caller rewrites (config.json, hf_quant_config.json), and hidden files.
//
// Anything else that cannot be copied is an error that names it. kIo with the system's reason: a
// file that cannot be read or a folder that cannot be listed. kBadInput: a FIFO, socket or device;
// a link out of the model, a dangling link, a link to a folder around itself; also such links with
// a config's name.
Result<std::vector<OtherFile>> other_files(const std::string& in);
// Copies them; returns their names.
Result<std::vector<std::string>> copy_other_files(const std::vector<OtherFile>& files,
                                                  const std::string& out);

}  // namespace nvfp4_moe::internal
