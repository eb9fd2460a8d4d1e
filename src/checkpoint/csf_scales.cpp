// Block scales that are stored as streams of CSF (core/csf.h): where a matrix's are, and their
// bytes.
#include <fmt/format.h>

#include <utility>
#include <vector>

#include "checkpoint/expert_memory.h"
#include "checkpoint/matrix_resolver.h"
#include "checkpoint/matrix_source.h"

namespace nvfp4_moe::internal {

bool MatrixResolver::locate_csf(const ExpertNames& names, int64_t rows, int64_t cols,
                                MatrixSource& out, FindingList& findings) const {
  const CsfCodec codec = names.parts.csf_codec();
  const auto fail = [&](const char* id, const std::string& tensor, std::string expected,
                        std::string actual) {
    findings.add({Severity::kError, id, out.layer, out.expert, tensor, std::move(expected),
                  std::move(actual)});
    return false;
  };
  if (const Status shape = check_csf_shape(codec, rows, cols); !shape.ok())
    return fail("csf_invalid", out.scales_name, "scales that CSF can hold", shape.message());
  const std::string fixed_name = out.scales_name + std::string(csf_fixed_suffix(codec));
  const std::string exceptions_name = out.scales_name + std::string(csf_exceptions_suffix(codec));
  TensorIndex::Ref fixed, exceptions;
  for (const auto& [name, ref] : {std::pair{&fixed_name, &fixed}, {&exceptions_name, &exceptions}})
    if (find(*name, *ref) == nullptr)
      return fail("missing_scale", *name, "a tensor", std::string(index_.absence(*name)));
  // Published files have the fixed stream in one dimension or in two.
  const std::vector<int64_t> tiles = {rows / 16, csf_tile_bytes(codec, cols)};
  if (fixed.info->dtype != DType::kU8)
    return fail("dtype_mismatch", fixed_name, shape_string(tiles) + " U8", describe(*fixed.info));
  if (fixed.info->shape != tiles && fixed.info->shape != std::vector<int64_t>{tiles[0] * tiles[1]})
    return fail("shape_mismatch", fixed_name, shape_string(tiles) + " U8", describe(*fixed.info));
  if (exceptions.info->dtype != DType::kU32)
    return fail("dtype_mismatch", exceptions_name, "(exceptions) U32", describe(*exceptions.info));
  const auto count = static_cast<int64_t>(exceptions.info->size_bytes() / 4);
  if (exceptions.info->shape.size() != 1 || count > rows * cols)
    return fail("shape_mismatch", exceptions_name,
                fmt::format("(exceptions) U32, at most {}, one for each scale", rows * cols),
                describe(*exceptions.info));
  out.csf = CsfPlace{codec,
                     rows,
                     cols,
                     fixed.file,
                     fixed.file->offset(*fixed.info),
                     exceptions.file,
                     exceptions.file->offset(*exceptions.info),
                     count};
  return true;
}

// Reads the tiles that have rows of this slice, and all exceptions: they have no index.
Status MatrixSource::read_csf(Storage& storage) {
  if (scales.data != nullptr || scales_place.rows == 0 || scales_place.cols == 0) return {};
  constexpr int64_t kTileRows = 16;
  const int64_t step = scales_place.row_stride / csf->cols;
  const auto first_elem = static_cast<int64_t>(scales_place.offset);
  const int64_t first_row = first_elem / csf->cols;
  const int64_t last_row = first_row + (scales_place.rows - 1) * step;
  const int64_t first = first_row / kTileRows;
  const int64_t count = last_row / kTileRows - first + 1;
  const int64_t tile_bytes = csf_tile_bytes(csf->codec, csf->cols);
  std::vector<uint8_t> fixed(static_cast<size_t>(count * tile_bytes));
  std::vector<uint32_t> words(static_cast<size_t>(csf->exceptions));
  NVFP4_MOE_TRY(csf->fixed_file->read(csf->fixed_offset + static_cast<uint64_t>(first * tile_bytes),
                                      fixed.data(), fixed.size()));
  NVFP4_MOE_TRY(csf->exceptions_file->read(csf->exceptions_offset, words.data(), words.size() * 4));
  const auto size = static_cast<size_t>(count * kTileRows * csf->cols);
  uint8_t* const to =
      storage.emplace_back(memory != nullptr ? memory->take(size) : std::vector<uint8_t>(size))
          .data();
  NVFP4_MOE_TRY(decode_csf(csf->codec, fixed, words, csf->rows, csf->cols, first, count, to));
  scales = {to + (first_elem - first * kTileRows * csf->cols), scales_place.rows, scales_place.cols,
            scales_place.row_stride, 1};
  return {};
}

}  // namespace nvfp4_moe::internal
