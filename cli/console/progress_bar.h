// ProgressBar: shows a long operation on stderr.
//
// On a terminal: one redrawn line with a bar, rate and remaining time. Elsewhere: a heartbeat line
// every 5 s, also while the operation is silent inside one item, because a loader that says nothing
// gets its pod killed. --quiet: nothing. A thread of its own draws, so that the operation never
// waits for a slow terminal.
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
  std::function<void(std::string_view)> write;  // raw bytes; stderr unless a test listens
  // Of the terminal, asked before each redraw since windows are resized; 0 or none: not known.
  std::function<int()> columns;
};
ProgressStyle progress_style(bool quiet);  // what stderr asks for

class ProgressBar {
 public:
  explicit ProgressBar(ProgressStyle style);
  ~ProgressBar();  // clears the line on a terminal; elsewhere a last line if any was written
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // For the library. Cancels the operation after SIGINT. The bar must outlive the callback.
  ProgressFn callback();

 private:
  std::string text() const;  // of the last state; call with the lock held
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

// One line: "pack [#####.....]  50%  3/6  2.1 GiB/s  eta 9.0 s  layer 12 expert 7"; 0 cells:
// without the bar.
std::string progress_text(const Progress& progress, int bar_cells);
// The same in at most that many columns, since a line that wraps cannot be redrawn: the bar has the
// room that the text leaves, if that is enough for one; a longer text is cut at its end.
std::string fitted_progress_text(const Progress& progress, int columns);

}  // namespace nvfp4_moe::internal::cli
