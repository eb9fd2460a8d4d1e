// The table of hostile checkpoint directories: headers, tensors, and index files; see
// hostile_safetensors.h.
#include "support/hostile_safetensors.h"

#include "support/gguf_builder.h"

namespace nvfp4_moe::internal::test {
namespace {

using Words = std::vector<std::string>;

std::string repeat(const std::string& text, size_t count) {
  std::string out;
  out.reserve(text.size() * count);
  for (size_t i = 0; i < count; ++i) out += text;
  return out;
}

// "NAME":{"dtype":...} with the fields as text, so that any of them can be wrong.
std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":" + dtype + ",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}
// A tensor of bytes.
std::string bytes(const std::string& name, const std::string& shape, const std::string& offsets) {
  return tensor(name, "\"U8\"", shape, offsets);
}
std::string object(const std::string& members) { return "{" + members + "}"; }

const std::string kX = bytes("x", "[4]", "[0,4]");
const std::string kGood = object(kX);

// model.safetensors with these bytes.
struct FileCase {
  const char* name;
  std::string bytes;
  Words words;
};
const FileCase kFiles[] = {
    {"empty_file", "", {"expected at least 8 bytes", "got 0"}},
    {"length_without_header", le64(16), {"expected 16 bytes", "got 0", "cut off"}},
    {"length_zero", le64(0), {"header length", "got 0"}},
    {"length_all_ones", le64(~uint64_t{0}) + kGood, {"header length", "18446744073709551615"}},
    {"length_minus_eight", le64(~uint64_t{7}) + kGood, {"header length", "18446744073709551608"}},
    {"length_over_limit",
     le64((uint64_t{100} << 20) + 1) + kGood,
     {"header length", "expected 2 to 104857600", "got 104857601"}},
    {"length_one_too_many", le64(kGood.size() + 5) + kGood + "data", {"cut off"}},
    {"length_one_too_few", le64(kGood.size() - 1) + kGood + "data", {"header: byte"}},
};

// The same with this header, followed by as many zeros.
struct HeaderCase {
  const char* name;
  std::string header;
  Words words;
  size_t data_bytes = 0;
};
const HeaderCase kHeaders[] = {
    {"header_begins_with_space", " " + kGood, {"expected '{'"}, 4},
    {"header_array", "[]", {"expected '{'", "got '['"}},
    {"header_is_pickle", "\x80\x02}q", {"expected '{'", "\\x80"}},
    {"json_trailing_text", "{} x", {"header: byte"}},
    {"json_text_after_nul", std::string("{}\0{\"x\":1}", 10), {"byte 2: NUL"}},
    {"utf8_stray_byte", "{\"a\xFF\":1}", {"byte 3: invalid UTF-8"}},
    {"utf8_in_value", "{\"__metadata__\":{\"a\":\"\x80\"}}", {"invalid UTF-8"}},
    {"duplicate_tensor", object(kX + "," + kX), {"duplicate key 'x'"}, 4},
    {"duplicate_tensor_escaped",
     object(kX + "," + bytes("\\u0078", "[4]", "[0,4]")),
     {"duplicate key 'x'"},
     4},
    {"nested_arrays",
     "{\"x\":" + repeat("[", 200000) + repeat("]", 200000) + "}",
     {"levels of nesting"}},
    {"too_many_dimensions",
     object(bytes("x", "[1" + repeat(",1", 99998) + ",4]", "[0,4]")),
     {"elements in one array"},
     4},
    {"metadata_array", R"({"__metadata__":[]})", {"expected an object", "an array of 0"}},
    {"metadata_nested", R"({"__metadata__":{"a":{"b":"c"}}})", {"'a'", "an object of 1"}},
    {"tensor_is_number", "{\"x\":1}", {"tensor 'x'", "expected an object", "got 1"}},
    {"no_dtype", R"({"x":{"shape":[4],"data_offsets":[0,4]}})", {"got no dtype"}, 4},
    {"extra_field",
     R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"strides":[1]}})",
     {"tensor 'x'", "'strides'"},
     4},
    {"name_empty", object(bytes("", "[4]", "[0,4]")), {"tensor ''", "1 to 4096 bytes"}, 4},
    {"name_too_long",
     object(bytes(std::string(4097, 'n'), "[4]", "[0,4]")),
     {"1 to 4096 bytes", "got 4097"},
     4},
    {"name_with_terminal_codes",
     object(bytes("\\u001b[2J\\u009b", "[5]", "[0,4]")),
     {"tensor '\\x1B[2J\\xC2\\x9B'"},
     4},
    {"data_after_the_end", kGood, {"expected 4 bytes", "got 5"}, 5},
    {"data_without_tensors", "{}", {"expected 0 bytes", "got 1"}, 1},
};

// The same with one tensor 'x' of these fields.
struct TensorCase {
  const char *name, *dtype, *shape, *offsets;
  size_t data_bytes;
  Words words;
};
const TensorCase kTensors[] = {
    {"dtype_unknown", "\"F6_E2M3\"", "[4]", "[0,3]", 3, {"dtype", "got \"F6_E2M3\""}},
    {"dtype_number", "8", "[4]", "[0,4]", 4, {"dtype", "expected a string", "got 8"}},
    {"shape_number", "\"U8\"", "4", "[0,4]", 4, {"shape", "expected an array", "got 4"}},
    {"shape_negative", "\"U8\"", "[-4]", "[0,4]", 4, {"shape", "got -4"}},
    {"shape_float", "\"U8\"", "[4.0]", "[0,4]", 4, {"shape", "integers", "got 4.0"}},
    {"shape_2_64", "\"U8\"", "[18446744073709551616]", "[0,4]", 4, {"shape", "integers"}},
    {"overflow_to_zero", "\"U8\"", "[4294967296,4294967296]", "[0,0]", 0, {"overflows"}},
    {"overflow_in_bytes", "\"F64\"", "[2305843009213693953]", "[0,8]", 8, {"overflows"}},
    {"overflow_before_zero", "\"U8\"", "[4294967296,4294967296,0]", "[0,0]", 0, {"overflows"}},
    {"f4_odd", "\"F4\"", "[3]", "[0,2]", 2, {"half a byte", "(3)"}},
    {"f4_counted_in_bytes", "\"F4\"", "[2,8]", "[0,16]", 16, {"8 bytes", "(2, 8) F4", "got 16"}},
    {"bytes_too_few", "\"F32\"", "[2,2]", "[0,15]", 15, {"16 bytes", "(2, 2) F32", "got 15"}},
    {"bytes_too_many", "\"F32\"", "[2,2]", "[0,17]", 17, {"expected 16 bytes", "got 17"}},
    {"offsets_object", "\"U8\"", "[4]", "{\"begin\":0}", 4, {"expected [begin, end]"}},
    {"offsets_negative", "\"U8\"", "[4]", "[-4,0]", 4, {"data_offsets", "got -4"}},
    {"offsets_float", "\"U8\"", "[4]", "[0,9007199254740993.0]", 4, {"offsets", "integers"}},
    {"offsets_wrap", "\"U8\"", "[4]", "[18446744073709551612,0]", 4, {"offsets", "integers"}},
    {"offsets_backwards", "\"U8\"", "[4]", "[4,0]", 4, {"begin <= end", "[4, 0]"}},
    {"offsets_past_end", "\"U8\"", "[5]", "[0,5]", 4, {"within the 4 bytes", "[0, 5]"}},
    {"offsets_far_past_end",
     "\"U8\"",
     "[9223372036854775807]",
     "[0,9223372036854775807]",
     4,
     {"within the 4 bytes"}},
    {"data_cut", "\"U8\"", "[4]", "[0,4]", 3, {"within the 3 bytes"}},
    {"hole_at_start", "\"U8\"", "[4]", "[4,8]", 8, {"begin at 0", "hole of 4 bytes"}},
};

// A second tensor 'b' next to 'a' in bytes 0 to 4.
struct SecondCase {
  const char *name, *shape, *offsets;
  size_t data_bytes;
  Words words;
};
const SecondCase kSeconds[] = {
    {"overlap_same", "[4]", "[0,4]", 4, {"overlap", "'a'"}},
    {"overlap_inside", "[2]", "[1,3]", 4, {"overlap"}},
    {"hole_between", "[4]", "[5,9]", 9, {"begin at 4", "hole of 1 bytes"}},
    {"hole_before_empty", "[0]", "[6,6]", 6, {"hole of 2 bytes"}},
};

// model.safetensors.index.json next to two good shards, one.safetensors {a, b} and two.safetensors
// {c}.
const std::string kMap = R"("a":"one.safetensors","b":"one.safetensors","c":"two.safetensors")";
std::string map(const std::string& entries) { return "{\"weight_map\":{" + entries + "}}"; }
const FileCase kIndexes[] = {
    {"index_cut", map(kMap).substr(0, 30), {"byte"}},
    {"index_array", "[]", {"expected an object with weight_map"}},
    {"index_map_empty", "{\"weight_map\":{}}", {"weight_map", "an object of 0"}},
    {"index_metadata_array",
     "{\"metadata\":[],\"weight_map\":{" + kMap + "}}",
     {"metadata", "an array of 0"}},
    {"index_duplicate_tensor", map(kMap + R"(,"a":"two.safetensors")"), {"duplicate key 'a'"}},
    {"index_bad_utf8", map(kMap + ",\"\xFF\":\"one.safetensors\""), {"invalid UTF-8"}},
    {"index_shard_missing", map(kMap + R"(,"d":"three.safetensors")"), {"'three", "not there"}},
    {"index_tensor_missing",
     map(kMap + R"(,"d":"two.safetensors")"),
     {"tensor 'd'", "'two.safetensors'", "does not hold it"}},
    {"index_contradicts_shard",
     map(R"("a":"one.safetensors","b":"two.safetensors")"),
     {"tensor 'b'", "places it in 'two.safetensors', which does not hold it"}},
};
// Values of the map that do not name a file of the folder.
const std::pair<const char*, std::string> kNotNames[] = {
    {"number", "1"},
    {"parent", R"("../d.safetensors")"},
    {"absolute", R"("/etc/d.safetensors")"},
    {"backslash", R"("..\\d.safetensors")"},
    {"nul", R"("one.safetensors\u0000.safetensors")"},
    {"too_long", "\"" + std::string(300, 'd') + ".safetensors\""},
};

const std::string kIndex = "model.safetensors.index.json";

std::vector<HostileCase> directories() {
  const std::string ab =
      safetensors_bytes(object(bytes("a", "[4]", "[0,4]") + "," + bytes("b", "[4]", "[4,8]")), 8);
  const HostileFile one{"one.safetensors", ab};
  const HostileFile two{"two.safetensors",
                        safetensors_bytes(object(bytes("c", "[4]", "[0,4]")), 4)};
  std::vector<HostileCase> all;
  for (const FileCase& index : kIndexes) {
    all.push_back({index.name, {one, two, {kIndex, index.bytes}}, index.words});
    all.back().words.push_back(kIndex);
  }
  for (const auto& [name, value] : kNotNames)
    all.push_back({std::string("index_file_") + name,
                   {one, two, {kIndex, map(kMap + ",\"d\":" + value)}},
                   {kIndex, "tensor 'd'", "plain name of a .safetensors file"}});
  const HostileFile good_index{kIndex, map(kMap)};
  all.insert(
      all.end(),
      {{"index_names_bad_shard",
        {one, {"two.safetensors", safetensors_bytes("{}", 1)}, good_index},
        {"two.safetensors", "expected 0 bytes", "got 1"}},
       {"index_shard_is_directory",
        {one, {"two.safetensors/", ""}, good_index},
        {"two.safetensors", "regular file"}},
       {"index_is_directory", {one, two, {kIndex + "/", ""}}, {kIndex, "regular file"}},
       {"no_files", {}, {"expected model.safetensors.index.json or *.safetensors files"}},
       {"two_files_one_name",
        {two, {"three.safetensors", two.bytes}},
        {"tensor 'c'", "holds it too"}},
       {"numbered_shard_missing",
        {{"model-00001-of-00003.safetensors", ab}, {"model-00003-of-00003.safetensors", two.bytes}},
        {"expected the 3 shards", "got 2"}},
       {"second_file_bad",
        {one, {"two.safetensors", "{}"}},
        {"two.safetensors", "expected at least 8 bytes", "got 2"}}});
  return all;
}

}  // namespace

std::string safetensors_bytes(const std::string& header, size_t data_bytes) {
  return le64(header.size()) + header + std::string(data_bytes, '\0');
}

const std::vector<HostileCase>& hostile_cases() {
  static const std::vector<HostileCase> cases = [] {
    std::vector<HostileCase> all = directories();
    const auto file = [&](const char* name, const std::string& bytes, Words words,
                          const char* word = "model.safetensors") {
      words.insert(words.end(), {"model.safetensors", word});
      all.push_back({name, {{"model.safetensors", bytes}}, words});
    };
    for (const FileCase& one : kFiles) file(one.name, one.bytes, one.words);
    for (const HeaderCase& one : kHeaders)
      file(one.name, safetensors_bytes(one.header, one.data_bytes), one.words);
    for (const TensorCase& one : kTensors)
      file(
          one.name,
          safetensors_bytes(object(tensor("x", one.dtype, one.shape, one.offsets)), one.data_bytes),
          one.words, "tensor 'x'");
    for (const SecondCase& one : kSeconds)
      file(one.name,
           safetensors_bytes(
               object(bytes("a", "[4]", "[0,4]") + "," + bytes("b", one.shape, one.offsets)),
               one.data_bytes),
           one.words, "tensor 'b'");
    std::string many(1, '{');
    for (size_t i = 0; i < (size_t{1} << 20) + 2; ++i)
      many.append(1, '"').append(std::to_string(i)).append("\":0,");
    many.back() = '}';
    file("too_many_tensors", safetensors_bytes(many, 0), {"keys in one object"});
    return all;
  }();
  return cases;
}

void write_hostile_case(const std::filesystem::path& dir, const HostileCase& hostile) {
  std::filesystem::create_directories(dir);
  for (const HostileFile& file : hostile.files) {
    if (file.name.ends_with('/'))
      std::filesystem::create_directories(dir / file.name);
    else
      write_file((dir / file.name).string(), file.bytes);
  }
}

}  // namespace nvfp4_moe::internal::test
