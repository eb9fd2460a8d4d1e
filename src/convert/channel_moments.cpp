#include "convert/channel_moments.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gguf/gguf.h"
#include "gguf/imatrix.h"
#include "io/files.h"
#include "safetensors/safetensors.h"

namespace nvfp4_moe::internal {
namespace {

constexpr double kDamping = 0.01;  // times the mean, added to each moment

template <class File>
Result<std::unique_ptr<TensorFile>> opened(Result<File> file) {
  if (!file.ok()) return file.status();
  return std::unique_ptr<TensorFile>(std::make_unique<File>(std::move(*file)));
}

// A safetensors file begins with the length of its header, which is a JSON object.
bool is_safetensors(const std::string& head) { return head.size() == 9 && head[8] == '{'; }

}  // namespace

Result<ChannelMoments> ChannelMoments::open(const std::string& path) {
  ChannelMoments moments;
  NVFP4_MOE_ASSIGN(const std::string head, read_first_bytes(path, 9));
  if (is_git_lfs_pointer(head)) return git_lfs_pointer_status().in(printable(path, 4096));
  if (head.starts_with("GGUF")) {
    moments.kind_ = Kind::kGguf;
    NVFP4_MOE_ASSIGN(moments.file_, opened(GgufFile::open(path)));
  } else if (is_safetensors(head)) {
    NVFP4_MOE_ASSIGN(moments.file_, opened(SafetensorsFile::open(path)));
  } else {
    moments.kind_ = Kind::kDat;
    Result<std::unique_ptr<TensorFile>> file = opened(ImatrixFile::open(path));
    if (!file.ok())
      return file.status().in("expected moments of calibrate --moments, or an imatrix");
    moments.file_ = std::move(*file);
  }
  return moments;
}

Result<const TensorInfo*> ChannelMoments::find(const std::vector<std::string>& names) const {
  for (const std::string& name : names) {
    if (const TensorInfo* info = file_->find(name)) return info;
  }
  return bad_input(fmt::format("{}: expected a tensor {}, got none", printable(file_->path(), 4096),
                               fmt::join(names, " or ")));
}

// Reads which experts had rows.
Result<std::vector<bool>> ChannelMoments::read_counts(const std::string& name, int64_t experts) {
  NVFP4_MOE_ASSIGN(const TensorInfo* info, find({name}));
  const std::string where = printable(file_->path(), 4096) + " " + name;
  const bool whole = kind_ == Kind::kMoments;  // I64; F32 in GGUF
  int64_t count = 1;
  for (const int64_t size : info->shape) count = size == 0 || count > experts ? 0 : count * size;
  if (info->blocks != nullptr || info->dtype != (whole ? DType::kI64 : DType::kF32) ||
      count != experts)
    return bad_input(fmt::format("{}: expected ({}) {}, got {}", where, experts,
                                 whole ? "I64" : "F32", describe(*info)));
  std::vector<std::byte> bytes(info->size_bytes());
  NVFP4_MOE_TRY(file_->read(file_->offset(*info), bytes.data(), bytes.size()));
  hasher_.bytes(bytes.data(), bytes.size());
  std::vector<bool> seen;
  for (int64_t e = 0; e < experts; ++e) {
    double rows = 0;
    if (whole) {
      int64_t number = 0;
      std::memcpy(&number, bytes.data() + 8 * e, sizeof(number));
      rows = static_cast<double>(number);
    } else {
      float number = 0;
      std::memcpy(&number, bytes.data() + 4 * e, sizeof(number));
      rows = static_cast<double>(number);
    }
    if (!(rows >= 0) || !std::isfinite(rows))
      return bad_input(
          fmt::format("{}: expert {}: expected a number of rows, got {}", where, e, rows));
    seen.push_back(rows > 0);
  }
  return seen;
}

Result<ChannelMoments::Stacked> ChannelMoments::read_stacked(const std::vector<std::string>& stems,
                                                             int64_t layer, int64_t experts,
                                                             int64_t cols) {
  std::vector<std::string> names;
  for (const std::string& stem : stems) {
    switch (kind_) {
      case Kind::kMoments: names.push_back(fmt::format("layers.{}.{}_moments", layer, stem)); break;
      case Kind::kGguf:
        names.push_back(fmt::format("blk.{}.{}.weight.in_sum2", layer, stem));
        break;
      case Kind::kDat: names.push_back(fmt::format("blk.{}.{}.weight", layer, stem)); break;
    }
  }
  Stacked stacked;
  stacked.cols = cols;
  NVFP4_MOE_ASSIGN(stacked.values, find(names));
  const TensorInfo& info = *stacked.values;
  const std::string where = printable(file_->path(), 4096) + " " + printable(info.name);
  const std::vector<int64_t> shape = kind_ == Kind::kDat ? std::vector<int64_t>{experts * cols}
                                                         : std::vector<int64_t>{experts, cols};
  if (info.blocks != nullptr || info.dtype != DType::kF32 || info.shape != shape)
    return bad_input(fmt::format("{}: expected {} F32 of {} experts with {} channels, got {}",
                                 where, shape_string(shape), experts, cols, describe(info)));
  stacked.weighted.assign(static_cast<size_t>(experts), true);
  if (kind_ == Kind::kGguf) {
    const std::string stem = info.name.substr(0, info.name.rfind('.'));
    NVFP4_MOE_ASSIGN(stacked.weighted, read_counts(stem + ".counts", experts));
  } else if (kind_ == Kind::kMoments) {
    NVFP4_MOE_ASSIGN(stacked.weighted, read_counts(fmt::format("layers.{}.rows", layer), experts));
  }
  hasher_.text(info.name);
  std::vector<float> row(static_cast<size_t>(cols));
  for (int64_t e = 0; e < experts; ++e) {
    NVFP4_MOE_TRY(file_->read(file_->offset(info) + static_cast<uint64_t>(e * cols) * 4, row.data(),
                              row.size() * 4));
    hasher_.bytes(row.data(), row.size() * 4);
    for (int64_t c = 0; c < cols; ++c) {
      const float moment = row[static_cast<size_t>(c)];
      if (!(moment >= 0) || !std::isfinite(moment))
        return bad_input(
            fmt::format("{}: expert {} channel {}: expected a finite number of at least 0, got {}",
                        where, e, c, moment));
    }
    if (std::all_of(row.begin(), row.end(), [](float moment) { return moment == 0; }))
      stacked.weighted[static_cast<size_t>(e)] = false;
  }
  return stacked;
}

Status ChannelMoments::read_layer(int64_t layer, int64_t experts, int64_t hidden,
                                  int64_t intermediate) {
  const bool own = kind_ == Kind::kMoments;
  const std::vector<std::string> inputs =
      own ? std::vector<std::string>{"hidden"}
          : std::vector<std::string>{"ffn_gate_exps", "ffn_gate_up_exps", "ffn_up_exps"};
  Layer of;
  hasher_.number(layer);
  NVFP4_MOE_ASSIGN(of.hidden, read_stacked(inputs, layer, experts, hidden));
  NVFP4_MOE_ASSIGN(of.intermediate, read_stacked({own ? "intermediate" : "ffn_down_exps"}, layer,
                                                 experts, intermediate));
  for (size_t e = 0; e < of.hidden.weighted.size(); ++e)
    unweighted_ += !of.hidden.weighted[e] || !of.intermediate.weighted[e];
  layers_[layer] = std::move(of);
  return file_->check_unchanged();
}

Result<std::vector<float>> ChannelMoments::moments_of(const Stacked& stacked,
                                                      int64_t expert) const {
  std::vector<float> moments;
  if (!stacked.weighted[static_cast<size_t>(expert)]) return moments;
  moments.resize(static_cast<size_t>(stacked.cols));
  NVFP4_MOE_TRY(
      file_->read(file_->offset(*stacked.values) + static_cast<uint64_t>(expert * stacked.cols) * 4,
                  moments.data(), moments.size() * 4));
  double sum = 0;
  for (const float moment : moments) sum += static_cast<double>(moment);
  // Also divides by the mean, so that a sum near the end of float stays within it.
  const double mean = sum / static_cast<double>(stacked.cols);
  for (float& moment : moments)
    moment = static_cast<float>(static_cast<double>(moment) / mean + kDamping);
  return moments;
}

Result<ExpertMoments> ChannelMoments::expert(int64_t layer, int64_t expert) const {
  const Layer& of = layers_.at(layer);
  ExpertMoments moments;
  NVFP4_MOE_ASSIGN(moments.hidden, moments_of(of.hidden, expert));
  NVFP4_MOE_ASSIGN(moments.intermediate, moments_of(of.intermediate, expert));
  NVFP4_MOE_TRY(file_->check_unchanged());
  return moments;
}

}  // namespace nvfp4_moe::internal
