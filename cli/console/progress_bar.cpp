#include "cli/console/progress_bar.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/console/console.h"
#include "cli/console/lists.h"

namespace nvfp4_moe::cli {
namespace {

constexpr int kBarCells = 24;

double share_done(const Progress& progress) {
  const bool by_bytes = progress.total_bytes > 0;
  const double done = static_cast<double>(by_bytes ? progress.done_bytes : progress.done);
  const double total = static_cast<double>(by_bytes ? progress.total_bytes : progress.total);
  return total > 0 ? std::clamp(done / total, 0.0, 1.0) : 0.0;
}

}  // namespace

std::string progress_text(const Progress& progress, bool bar) {
  const double share = share_done(progress);
  std::string out(progress.what);
  if (bar) {
    const int filled = static_cast<int>(share * kBarCells);
    out += fmt::format(" [{}{}]", std::string(static_cast<size_t>(filled), '#'),
                       std::string(static_cast<size_t>(kBarCells - filled), '.'));
  }
  out += fmt::format(" {:3.0f}%", share * 100);
  if (progress.total > 0) out += fmt::format("  {}/{}", progress.done, progress.total);
  if (progress.done_bytes > 0 && progress.elapsed_s > 0) {
    out += fmt::format(
        "  {}/s", bytes_text(static_cast<uint64_t>(static_cast<double>(progress.done_bytes) / progress.elapsed_s)));
  }
  if (share > 0 && share < 1) out += "  eta " + duration_text(progress.elapsed_s * (1 - share) / share);
  if (!progress.item.empty()) out += fmt::format("  {}", progress.item);
  return out;
}

ProgressStyle progress_style(bool quiet) {
  ProgressStyle style;
  style.quiet = quiet;
  style.terminal = stderr_is_terminal();
  style.period = std::chrono::milliseconds(style.terminal ? 100 : 5000);
  style.write = [](std::string_view text) { log_raw(text); };
  return style;
}

ProgressBar::ProgressBar(ProgressStyle style) : style_(std::move(style)), start_(std::chrono::steady_clock::now()) {
  if (!style_.quiet) thread_ = std::thread([this] { loop(); });
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
  if (style_.terminal) {
    style_.write("\r\x1b[K");
  } else {
    style_.write(text() + "\n");
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
  std::string out = printable(progress_text(now, style_.terminal));
  if (!style_.terminal) out += "  after " + duration_text(now.elapsed_s);
  return out;
}

void ProgressBar::draw() {
  if (!started_) return;
  style_.write(style_.terminal ? "\r" + text() + "\x1b[K" : text() + "\n");
  drawn_ = true;
}

void ProgressBar::loop() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, style_.period, [this] { return stop_; })) draw();
}

}  // namespace nvfp4_moe::cli
