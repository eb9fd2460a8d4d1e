// Console: the two streams. stdout carries results only, stderr carries progress and errors.
//
// Colour and redrawn lines are used only on a terminal and without NO_COLOR. Text that came from a
// file (tensor names) passes through printable() of core/printable.h, so that no escape sequence of
// a hostile file reaches a terminal and one line stays one.
#pragma once

#include <string>
#include <string_view>

namespace nvfp4_moe::internal::cli {

// A closed pipe ends output quietly instead of killing the process; SIGINT asks running work to
// stop.
void install_signal_handlers();
bool interrupted();

bool stdout_has_color();
bool stderr_is_terminal();
int stderr_columns();  // of the terminal now; 0 if stderr is not a terminal or does not report them

// The argument as a shell takes it, for commands that are printed to be run; printable itself.
std::string shell_quoted(const std::string& argument);

// Writes to stdout. Failures are remembered, not reported here.
void print(std::string_view text);
bool stdout_used();  // whether print was called
// Flushes stdout. Empty if everything was written or the reader went away (EPIPE); else the
// system's reason.
std::string close_stdout();

// Writes one whole line to stderr, control characters escaped.
void log_line(std::string_view text);
// Writes raw bytes to stderr (the progress bar's redraws).
void log_raw(std::string_view text);

}  // namespace nvfp4_moe::internal::cli
