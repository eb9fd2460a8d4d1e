// Targets of PTX. The table holds the instructions that no target without a suffix has, as ptxas
// 13.0 accepts them.
#include "cudart/targets.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace ptxemu {
namespace {

constexpr const char *kHopper = "90a", *kBlackwell = "100a 100f 101a 101f 103a 103f 110a 110f",
                     *kBlackwellOnly = "100a 101a 103a 110a", *kConsumer = "120a 120f 121a 121f",
                     *kBoth = "100a 100f 101a 101f 103a 103f 110a 110f 120a 120f 121a 121f",
                     *kAll = "90a 100a 100f 101a 101f 103a 103f 110a 110f 120a 120f 121a 121f";

// Instructions by their first word and a part of the rest; the first row that fits counts.
struct Feature {
  const char *word, *part, *targets;
};
constexpr Feature kFeatures[] = {
    {"wgmma", "", kHopper},
    {"setmaxnreg", "", kAll},
    {"tcgen05", ".kind::mxf4nvf4.block_scale.scale_vec::4X", kBlackwellOnly},
    {"tcgen05", ".kind::i8", "100a 101a 110a"},
    {"tcgen05", "", kBlackwell},
    {"mma", ".block_scale", kConsumer},
    {"mma", ".kind::f8f6f4", kBoth},
    {"ldmatrix", ".b8", kBoth},
    {"stmatrix", ".b8", kBoth},
    {"redux", ".f32", "100a 100f 101a 101f 103a 103f"},
    {"cvt", "e2m1x2", kBoth},
    {"cvt", "ue8m0x2", kBoth},
    {"clusterlaunchcontrol", ".multicast::cluster::all", kBoth},
    {"tensormap", ".replace", kAll},
    {"cp", ".cta_group::", kBlackwell},
};

bool contains_word(std::string_view words, std::string_view word) {
  for (size_t at = words.find(word); at != words.npos; at = words.find(word, at + 1))
    if ((at == 0 || words[at - 1] == ' ') &&
        (at + word.size() == words.size() || words[at + word.size()] == ' '))
      return true;
  return false;
}

// An instruction's name with its modifiers, without what may come before it: braces, a label, a
// guard.
std::string_view name_of(std::string_view statement) {
  while (true) {
    const size_t first = statement.find_first_not_of(" \t\r{}");
    if (first == statement.npos) return {};
    statement.remove_prefix(first);
    const std::string_view word = statement.substr(0, statement.find_first_of(" \t\r"));
    if (word.empty() || (word[0] != '@' && word.back() != ':')) return word;
    statement.remove_prefix(word.size());
  }
}

const Feature* feature_of(std::string_view name) {
  for (const Feature& feature : kFeatures) {
    const size_t length = std::strlen(feature.word);
    if (name.size() > length && name[length] == '.' && name.substr(0, length) == feature.word &&
        name.find(feature.part) != name.npos)
      return &feature;
  }
  return nullptr;
}

}  // namespace

std::string Target::name() const {
  std::string name("sm_");
  name += std::to_string(number);
  if (suffix) name += suffix;
  return name;
}

std::string Target::devices() const {
  const std::string own = std::to_string(number / 10) + "." + std::to_string(number % 10);
  return suffix == 'a'   ? own + " and no other"
         : suffix == 'f' ? own + " or later of the same major version"
                         : own + " or later";
}

Target target_of(const std::string& ptx) {
  const size_t at = ptx.find("\n.target sm_");
  if (at == std::string::npos) return {0, 0};
  char* end;
  const long value = std::strtol(ptx.c_str() + at + 12, &end, 10);
  return {static_cast<int>(value), *end == 'a' || *end == 'f' ? *end : '\0'};
}

bool runs_on(const Target& target, int compute_capability) {
  if (target.suffix == 'a') return target.number == compute_capability;
  return target.number <= compute_capability &&
         (target.suffix != 'f' || target.number / 10 == compute_capability / 10);
}

std::string missing_feature(const std::string& ptx, const Target& target) {
  if (target.number == 0) return "";
  const std::string own = target.name().substr(3);
  size_t line = 1;
  for (size_t begin = 0; begin < ptx.size(); ++line) {
    const size_t end = std::min(ptx.find('\n', begin), ptx.size());
    std::string_view text(ptx.data() + begin, end - begin);
    text = text.substr(0, text.find("//"));
    for (size_t at = 0; at < text.size();) {
      const size_t semicolon = std::min(text.find(';', at), text.size());
      const std::string_view name = name_of(text.substr(at, semicolon - at));
      const Feature* feature = feature_of(name);
      if (feature && !contains_word(feature->targets, own))
        return "PTX line " + std::to_string(line) + ": " + std::string(name) +
               " requires one of the targets " + feature->targets + ", and this text is for " + own;
      at = semicolon + 1;
    }
    begin = end + 1;
  }
  return "";
}

}  // namespace ptxemu
