// Carrying a checkpoint's other content over into a new directory, byte for byte.
//
// A symbolic link is copied as the file that it leads to, and only where that lies inside the
// model: below its folder, or, in Hugging Face's cache (REPOSITORY/snapshots/REVISION/x ->
// ../../blobs/HASH), in the repository's blobs. A link that leads out of the model would carry a
// file of this machine, its passwords say, into what is published.
#pragma once

#include <string>
#include <vector>

#include "core/status.h"
#include "safetensors/safetensors.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe::internal {

// kInvalidArgument if OUT is IN, or one contains the other.
Status check_apart(const std::string& in, const std::string& out);

// Streams one tensor, 16 MiB at a time. kIo if its file was cut or written to.
Status copy_tensor(const TensorIndex::Ref& from, ShardedWriter& writer);

struct OtherFile {
  std::string name;  // relative to the model
  std::string from;  // what is read: links resolved
};
// Every file of IN that is not weights, their index or a config that the caller rewrites
// (config.json, hf_quant_config.json), with subdirectories, by name; hidden ones are left out.
// Whatever else cannot be copied is an error that names it: kIo with the system's reason for a file
// that cannot be read or a folder that cannot be listed, kBadInput for a FIFO, socket or device,
// and for a link that leads out of the model, to nothing, or to a folder around itself; also for a
// link of a config's name.
Result<std::vector<OtherFile>> other_files(const std::string& in);
// Copies them; returns their names.
Result<std::vector<std::string>> copy_other_files(const std::vector<OtherFile>& files,
                                                  const std::string& out);

}  // namespace nvfp4_moe::internal
