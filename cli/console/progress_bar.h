// ProgressBar: shows a long operation on stderr.
//
// On a terminal it redraws one line with a bar, rate and remaining time. Elsewhere it prints a
// heartbeat line every 5 s, even if the operation reports nothing inside one item, because health
// checks kill silent loaders. With --quiet it prints nothing. A separate thread draws, so that the
// operation never waits for a slow terminal.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "core/progress.h"

namespace nvfp4_moe::internal::cli {

struct ProgressStyle {
  bool quiet = false;
  bool terminal = false;
  std::chrono::milliseconds period{5000};
  std::function<void(std::string_view)> write;  // raw bytes; to stderr except in tests
  // The terminal's width, queried before each redraw because windows are resized; 0 or null:
  // unknown.
  std::function<int()> columns;
};
ProgressStyle progress_style(bool quiet);  // the style for stderr

class ProgressBar {
 public:
  explicit ProgressBar(ProgressStyle style);
  ~ProgressBar();  // clears the line on a terminal; elsewhere prints a last line if it printed any
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // The callback for the library. Cancels the operation after SIGINT. The bar must outlive it.
  ProgressFn callback();

 private:
  std::string text() const;  // text of the last state; call with the lock held
  void draw();
  void loop();

  ProgressStyle style_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  bool started_ = false;
  bool drawn_ = false;
  std::string what_, item_;
  Progress last_;
  std::chrono::steady_clock::time_point start_;
  std::thread thread_;
};

// One line: "pack [#####.....]  50%  3/6  2.1 GiB/s  eta 9.0 s  layer 12 expert 7". bar_cells 0
// leaves the bar out.
std::string progress_text(const Progress& progress, int bar_cells);
// The same in at most that many columns, because a line that wraps cannot be redrawn. The bar gets
// the room that the text leaves, if that is enough; a longer text is cut at its end.
std::string fitted_progress_text(const Progress& progress, int columns);

}  // namespace nvfp4_moe::internal::cli
