#include "cli/console/progress_bar.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <system_error>

#include "cli/console/console.h"
#include "cli/console/lists.h"
#include "core/printable.h"

namespace nvfp4_moe::internal::cli {
namespace {

constexpr int kMostBarCells = 24, kLeastBarCells = 8;
constexpr int kUsualColumns = 80;

// Continuation bytes of a UTF-8 character take no column. East Asian wide characters and emoji, by
// their ranges, take two columns.
bool continues(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }
size_t columns_at(std::string_view text, size_t i) {
  const auto lead = static_cast<unsigned char>(text[i]);
  if (continues(text[i])) return 0;
  if (lead >= 0xF0) return 2;
  if (lead < 0xE1 || i + 1 >= text.size()) return 1;
  const auto next = static_cast<unsigned char>(text[i + 1]);
  if (lead == 0xE1) return next >= 0x84 && next <= 0x85 ? 2 : 1;  // U+1100 to U+117F, Hangul
  if (lead == 0xE2) return next >= 0xBA ? 2 : 1;                  // from U+2E80 on, CJK
  return lead <= 0xED || (lead == 0xEF && (next == 0xBC || next == 0xB9))
             ? 2
             : 1;  // to U+D7FF; full-width forms
}
size_t columns_of(std::string_view text) {
  size_t columns = 0;
  for (size_t i = 0; i < text.size(); ++i) columns += columns_at(text, i);
  return columns;
}
// Cuts a longer text to that many columns. The last two are "..".
std::string cut(std::string_view text, size_t columns) {
  const size_t kept = columns > 2 ? columns - 2 : 0;
  size_t used = 0, end = 0;
  while (end < text.size() && used + columns_at(text, end) <= kept) used += columns_at(text, end++);
  return std::string(text.substr(0, end)) + std::string(std::min<size_t>(columns, 2), '.');
}

double share_done(const Progress& progress) {
  const bool by_bytes = progress.total_bytes > 0;
  const double done = static_cast<double>(by_bytes ? progress.done_bytes : progress.done);
  const double total = static_cast<double>(by_bytes ? progress.total_bytes : progress.total);
  return total > 0 ? std::clamp(done / total, 0.0, 1.0) : 0.0;
}

}  // namespace

std::string progress_text(const Progress& progress, int bar_cells) {
  const double share = share_done(progress);
  std::string out(progress.what);
  if (bar_cells > 0) {
    const int filled = static_cast<int>(share * bar_cells);
    out += fmt::format(" [{}{}]", std::string(static_cast<size_t>(filled), '#'),
                       std::string(static_cast<size_t>(bar_cells - filled), '.'));
  }
  out += fmt::format(" {:3.0f}%", share * 100);
  if (progress.total > 0) out += fmt::format("  {}/{}", progress.done, progress.total);
  if (progress.done_bytes > 0 && progress.elapsed_s > 0) {
    out +=
        fmt::format("  {}/s", bytes_text(static_cast<uint64_t>(
                                  static_cast<double>(progress.done_bytes) / progress.elapsed_s)));
  }
  if (share > 0 && share < 1)
    out += "  eta " + duration_text(progress.elapsed_s * (1 - share) / share);
  if (!progress.item.empty()) out += fmt::format("  {}", progress.item);
  return out;
}

std::string fitted_progress_text(const Progress& progress, int columns) {
  const auto width = static_cast<size_t>(std::max(columns, 0));
  const std::string text = printable(progress_text(progress, 0), kWholeText);
  const size_t used = columns_of(text);
  if (used > width) return cut(text, width);
  // a space and two brackets
  const int cells = std::min(kMostBarCells, static_cast<int>(width - used) - 3);
  return cells < kLeastBarCells ? text : printable(progress_text(progress, cells), kWholeText);
}

ProgressStyle progress_style(bool quiet) {
  ProgressStyle style;
  style.quiet = quiet;
  style.terminal = stderr_is_terminal();
  style.period = std::chrono::milliseconds(style.terminal ? 100 : 5000);
  style.write = [](std::string_view text) { log_raw(text); };
  style.columns = stderr_columns;
  return style;
}

ProgressBar::ProgressBar(ProgressStyle style)
    : style_(std::move(style)), start_(std::chrono::steady_clock::now()) {
  if (style_.quiet) return;
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error&) {  // no thread available: no bar
  }
}

ProgressBar::~ProgressBar() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
  if (!drawn_) return;
  try {
    style_.write(style_.terminal ? "\r\x1b[K" : text() + "\n");
  } catch (const std::bad_alloc&) {  // the bar must not end the operation
  }
}

ProgressFn ProgressBar::callback() {
  return [this](const Progress& progress) {
    const std::lock_guard lock(mutex_);
    what_ = progress.what;
    item_ = progress.item;
    last_ = progress;
    last_.what = what_;
    last_.item = item_;
    started_ = true;
    return !interrupted();
  };
}

std::string ProgressBar::text() const {
  Progress now = last_;
  now.elapsed_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  if (!style_.terminal)
    return printable(progress_text(now, 0), kWholeText) + "  after " + duration_text(now.elapsed_s);
  const int columns = style_.columns ? style_.columns() : 0;
  // The last column stays free: some terminals wrap as soon as it is written.
  return fitted_progress_text(now, (columns > 0 ? columns : kUsualColumns) - 1);
}

void ProgressBar::draw() {
  if (!started_) return;
  style_.write(style_.terminal ? "\r" + text() + "\x1b[K" : text() + "\n");
  drawn_ = true;
}

void ProgressBar::loop() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, style_.period, [this] { return stop_; })) {
    try {
      draw();
    } catch (const std::bad_alloc&) {  // the next line may succeed
    }
  }
}

}  // namespace nvfp4_moe::internal::cli
