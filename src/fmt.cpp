// fmt's own functions, compiled once for the whole library and the command line.
//
// By fmt's header-only target each object compiles them again, which takes longer than what most
// files say themselves; the compiled target is a shared library, and this one depends on none but
// the compiler's. What is instantiated is what the headers of fmt 9 leave to a library:
// src/CMakeLists.txt takes the header-only target if fmt is newer.
#include <fmt/format-inl.h>

template fmt::detail::thousands_sep_result<char> fmt::detail::thousands_sep_impl<char>(locale_ref);
template char fmt::detail::decimal_point_impl<char>(locale_ref);
template fmt::detail::dragonbox::decimal_fp<float> fmt::detail::dragonbox::to_decimal<float>(
    float) noexcept;
template fmt::detail::dragonbox::decimal_fp<double> fmt::detail::dragonbox::to_decimal<double>(
    double) noexcept;
template void fmt::detail::buffer<char>::append<char>(const char*, const char*);
