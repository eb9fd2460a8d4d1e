// The table of hostile checkpoint directories: headers, tensors, and index files; see
// hostile_safetensors.h.
#include "support/hostile_safetensors.h"

#include "support/gguf_builder.h"

namespace nvfp4_moe::internal::test {
namespace {

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
std::string object(const std::string& members) { return "{" + members + "}"; }

class Table {
 public:
  // One file model.safetensors with these bytes.
  void file(const std::string& name, std::string bytes, std::vector<std::string> words) {
    words.push_back("model.safetensors");
    cases_.push_back({name, {{"model.safetensors", std::move(bytes)}}, std::move(words)});
  }
  // One file with this header, followed by data_bytes zeros.
  void header(const std::string& name, const std::string& text, std::vector<std::string> words,
              size_t data_bytes = 0) {
    file(name, safetensors_bytes(text, data_bytes), std::move(words));
  }
  // One file with one tensor 'x' of these fields.
  void one_tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets, size_t data_bytes, std::vector<std::string> words) {
    words.push_back("tensor 'x'");
    header(name, object(tensor("x", dtype, shape, offsets)), std::move(words), data_bytes);
  }
  // model.safetensors.index.json next to two good shards, one.safetensors {a, b} and
  // two.safetensors {c}.
  void index(const std::string& name, const std::string& text, std::vector<std::string> words,
             std::vector<HostileFile> more = {}) {
    words.push_back("model.safetensors.index.json");
    std::vector<HostileFile> files = two_shards();
    files.push_back({"model.safetensors.index.json", text});
    files.insert(files.end(), more.begin(), more.end());
    cases_.push_back({name, std::move(files), std::move(words)});
  }
  void directory(const std::string& name, std::vector<HostileFile> files,
                 std::vector<std::string> words) {
    cases_.push_back({name, std::move(files), std::move(words)});
  }

  static std::vector<HostileFile> two_shards() {
    return {
        {"one.safetensors", safetensors_bytes(object(tensor("a", "\"U8\"", "[4]", "[0,4]") + "," +
                                                     tensor("b", "\"U8\"", "[4]", "[4,8]")),
                                              8)},
        {"two.safetensors", safetensors_bytes(object(tensor("c", "\"U8\"", "[4]", "[0,4]")), 4)}};
  }

  std::vector<HostileCase> take() { return std::move(cases_); }

 private:
  std::vector<HostileCase> cases_;
};

const std::string kGood = "{" + tensor("x", "\"U8\"", "[4]", "[0,4]") + "}";

void add_lengths(Table& table) {
  table.file("empty_file", "", {"expected at least 8 bytes", "got 0"});
  table.file("seven_bytes", std::string(7, '\0'), {"expected at least 8 bytes", "got 7"});
  table.file("length_without_header", le64(16), {"expected 16 bytes", "got 0", "cut off"});
  table.file("length_zero", le64(0), {"header length", "got 0"});
  table.file("length_one", le64(1) + "{", {"header length", "got 1"});
  table.file("length_all_ones", le64(~uint64_t{0}) + kGood,
             {"header length", "got 18446744073709551615"});
  table.file("length_minus_eight", le64(~uint64_t{7}) + kGood,
             {"header length", "got 18446744073709551608"});
  table.file("length_sign_bit", le64(uint64_t{1} << 63) + kGood,
             {"header length", "9223372036854775808"});
  table.file("length_over_limit", le64((uint64_t{100} << 20) + 1) + kGood,
             {"header length", "expected 2 to 104857600", "got 104857601"});
  table.file("length_at_limit_without_bytes", le64(uint64_t{100} << 20) + kGood,
             {"expected 104857600 bytes", "cut off"});
  table.file("length_big_endian", std::string("\0\0\0\0\0\0\0\2{}", 10), {"header length"});
  table.file("length_one_too_many", le64(kGood.size() + 5) + kGood + "data", {"cut off"});
  table.file("length_one_too_few", le64(kGood.size() - 1) + kGood + "data", {"header: byte"});
  table.file("header_cut_in_half", le64(kGood.size()) + kGood.substr(0, kGood.size() / 2),
             {"cut off"});
}

void add_json(Table& table) {
  table.header("header_begins_with_space", " " + kGood, {"expected '{'"}, 4);
  table.header("header_array", "[]", {"expected '{'", "got '['"});
  table.header("header_null", "null", {"expected '{'", "got 'n'"});
  table.header("header_zeros", std::string(16, '\0'), {"expected '{'", "got '\\x00'"});
  table.header("header_byte_order_mark", "\xEF\xBB\xBF{}", {"expected '{'"});
  table.header("header_is_pickle", "\x80\x02}q", {"expected '{'", "\\x80"});
  table.header("json_cut", "{\"x\":", {"header: byte"});
  table.header("json_no_quotes", "{x:1}", {"header: byte", "syntax error"});
  table.header("json_trailing_comma", "{\"__metadata__\":{},}", {"header: byte"});
  table.header("json_trailing_text", "{} x", {"header: byte"});
  table.header("json_nul_padding", std::string("{}\0\0", 4), {"byte 2: NUL"});
  table.header("json_text_behind_nul", std::string("{}\0{\"x\":1}", 10), {"byte 2: NUL"});
  table.header("json_nan", "{\"x\":NaN}", {"header: byte"});
  table.header("json_number_overflow", "{\"x\":1e999}", {"header: byte", "number overflow"});
  table.header("json_control_character", "{\"a\nb\":1}", {"header: byte"});
  table.header("utf8_stray_byte", "{\"a\xFF\":1}", {"byte 3: invalid UTF-8"});
  table.header("utf8_overlong", "{\"a\xC0\xAF\":1}", {"byte 3: invalid UTF-8"});
  table.header("utf8_surrogate", "{\"a\xED\xA0\x80\":1}", {"byte 3: invalid UTF-8"});
  table.header("utf8_past_unicode", "{\"a\xF4\x90\x80\x80\":1}", {"byte 3: invalid UTF-8"});
  table.header("utf8_cut", "{\"a\xE4\xB8", {"byte 3: invalid UTF-8"});
  table.header("utf8_in_value", "{\"__metadata__\":{\"a\":\"\x80\"}}", {"invalid UTF-8"});
  table.header("escape_lone_surrogate", "{\"\\ud800\":1}", {"header: byte", "surrogate"});
  const std::string x = tensor("x", "\"U8\"", "[4]", "[0,4]");
  table.header("duplicate_tensor", object(x + "," + x), {"duplicate key 'x'"}, 4);
  table.header("duplicate_tensor_escaped",
               object(x + "," + tensor("\\u0078", "\"U8\"", "[4]", "[0,4]")), {"duplicate key 'x'"},
               4);
  table.header("duplicate_field",
               "{\"x\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
               {"duplicate key 'dtype'"}, 4);
  table.header(
      "duplicate_offsets",
      "{\"x\":{\"data_offsets\":[0,9999],\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
      {"duplicate key 'data_offsets'"}, 4);
  table.header("duplicate_metadata", "{\"__metadata__\":{},\"__metadata__\":{}}",
               {"duplicate key '__metadata__'"});
  table.header("duplicate_metadata_key", "{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}",
               {"duplicate key 'a'"});
  table.header("nested_arrays", "{\"x\":" + repeat("[", 200000) + repeat("]", 200000) + "}",
               {"levels of nesting"});
  table.header("nested_arrays_open", "{\"x\":" + repeat("[", 1000000), {"levels of nesting"});
  table.header("nested_objects", repeat("{\"x\":", 200000) + "1" + repeat("}", 200000),
               {"levels of nesting"});
  table.header("nested_shape", object(tensor("x", "\"U8\"", "[[4]]", "[0,4]")),
               {"levels of nesting"}, 4);
  const std::string long_shape = repeat("[1", 1) + repeat(",1", 99998) + ",4]";
  table.header("too_many_dimensions", object(tensor("x", "\"U8\"", long_shape, "[0,4]")),
               {"elements in one array"}, 4);
  std::string many(1, '{');
  for (size_t i = 0; i < (size_t{1} << 20) + 2; ++i)
    many.append(1, '"').append(std::to_string(i)).append("\":0,");
  many.back() = '}';
  table.header("too_many_tensors", many, {"keys in one object"});
}

void add_fields(Table& table) {
  table.header("metadata_array", "{\"__metadata__\":[]}",
               {"__metadata__", "expected an object", "an array of 0"});
  table.header("metadata_nested", "{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}",
               {"__metadata__: 'a'", "an object of 1"});
  table.header("tensor_is_number", "{\"x\":1}", {"tensor 'x'", "expected an object", "got 1"});
  table.header("tensor_is_array", "{\"x\":[0,4]}", {"tensor 'x'", "expected an object"}, 4);
  table.header("tensor_is_empty", "{\"x\":{}}", {"tensor 'x'", "got no dtype"});
  table.header("no_dtype", "{\"x\":{\"shape\":[4],\"data_offsets\":[0,4]}}",
               {"tensor 'x'", "got no dtype"}, 4);
  table.header("no_shape", "{\"x\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}",
               {"tensor 'x'", "got no shape"}, 4);
  table.header("no_offsets", "{\"x\":{\"dtype\":\"U8\",\"shape\":[4]}}",
               {"tensor 'x'", "got no data_offsets"}, 4);
  table.header("extra_field",
               "{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"strides\":[1]}}",
               {"tensor 'x'", "'strides'"}, 4);
  table.header("name_empty", object(tensor("", "\"U8\"", "[4]", "[0,4]")),
               {"tensor ''", "1 to 4096 bytes"}, 4);
  table.header("name_too_long", object(tensor(std::string(4097, 'n'), "\"U8\"", "[4]", "[0,4]")),
               {"1 to 4096 bytes", "got 4097"}, 4);
  table.header("name_with_line_break", object(tensor("a\\nb", "\"U8\"", "[5]", "[0,4]")),
               {"tensor 'a\\x0Ab'"}, 4);
  table.header("name_with_terminal_codes",
               object(tensor("\\u001b[2J\\u009b", "\"U8\"", "[5]", "[0,4]")),
               {"tensor '\\x1B[2J\\xC2\\x9B'"}, 4);
  table.one_tensor("dtype_unknown", "\"F6_E2M3\"", "[4]", "[0,3]", 3, {"dtype", "got \"F6_E2M3\""});
  table.one_tensor("dtype_lower_case", "\"u8\"", "[4]", "[0,4]", 4, {"dtype", "got \"u8\""});
  table.one_tensor("dtype_with_nul", "\"U8\\u0000\"", "[4]", "[0,4]", 4, {"dtype", "U8\\x00"});
  table.one_tensor("dtype_number", "8", "[4]", "[0,4]", 4, {"dtype", "expected a string", "got 8"});
}

void add_shapes(Table& table) {
  table.one_tensor("shape_number", "\"U8\"", "4", "[0,4]", 4,
                   {"shape", "expected an array", "got 4"});
  table.one_tensor("shape_string", "\"U8\"", "\"[4]\"", "[0,4]", 4, {"shape", "expected an array"});
  table.one_tensor("shape_negative", "\"U8\"", "[-4]", "[0,4]", 4, {"shape", "got -4"});
  table.one_tensor("shape_two_negatives", "\"U8\"", "[-2,-2]", "[0,4]", 4, {"shape", "got -2"});
  table.one_tensor("shape_float", "\"U8\"", "[4.0]", "[0,4]", 4, {"shape", "integers", "got 4.0"});
  table.one_tensor("shape_exponent", "\"U8\"", "[4e0]", "[0,4]", 4, {"shape", "integers"});
  table.one_tensor("shape_text", "\"U8\"", "[\"4\"]", "[0,4]", 4, {"shape", "got \"4\""});
  table.one_tensor("shape_bool", "\"U8\"", "[true]", "[0,1]", 1, {"shape", "got true"});
  table.one_tensor("shape_null", "\"U8\"", "[null]", "[0,4]", 4, {"shape", "got null"});
  table.one_tensor("shape_2_63", "\"U8\"", "[9223372036854775808]", "[0,4]", 4,
                   {"shape", "integers"});
  table.one_tensor("shape_2_64", "\"U8\"", "[18446744073709551616]", "[0,4]", 4,
                   {"shape", "integers"});
  table.header("shape_thousand_digits",
               object(tensor("x", "\"U8\"", "[1" + std::string(1000, '0') + "]", "[0,4]")),
               {"number overflow"}, 4);
  table.one_tensor("shape_overflow_to_zero", "\"U8\"", "[4294967296,4294967296]", "[0,0]", 0,
                   {"overflows"});
  table.one_tensor("shape_overflow_to_four", "\"U8\"", "[9223372036854775807,9223372036854775804]",
                   "[0,4]", 4, {"overflows"});
  table.one_tensor("shape_overflow_in_bytes", "\"F64\"", "[2305843009213693953]", "[0,8]", 8,
                   {"overflows"});
  table.one_tensor("shape_overflow_beside_zero", "\"U8\"", "[4294967296,4294967296,0]", "[0,0]", 0,
                   {"overflows"});
  table.one_tensor("f4_odd", "\"F4\"", "[3]", "[0,2]", 2, {"half a byte", "(3)"});
  table.one_tensor("f4_counted_in_bytes", "\"F4\"", "[2,8]", "[0,16]", 16,
                   {"expected 8 bytes", "(2, 8) F4", "got 16"});
  table.one_tensor("bytes_too_few", "\"F32\"", "[2,2]", "[0,15]", 15,
                   {"expected 16 bytes", "(2, 2) F32", "got 15"});
  table.one_tensor("bytes_too_many", "\"F32\"", "[2,2]", "[0,17]", 17,
                   {"expected 16 bytes", "got 17"});
  table.one_tensor("scalar_without_bytes", "\"F32\"", "[]", "[0,0]", 0,
                   {"expected 4 bytes", "() F32", "got 0"});
  table.one_tensor("empty_with_bytes", "\"F32\"", "[0,4]", "[0,16]", 16,
                   {"expected 0 bytes", "got 16"});
}

void add_offsets(Table& table) {
  table.one_tensor("offsets_object", "\"U8\"", "[4]", "{\"begin\":0}", 4,
                   {"data_offsets", "expected [begin, end]"});
  table.one_tensor("offsets_one", "\"U8\"", "[4]", "[4]", 4, {"data_offsets", "an array of 1"});
  table.one_tensor("offsets_three", "\"U8\"", "[4]", "[0,4,8]", 8,
                   {"data_offsets", "an array of 3"});
  table.one_tensor("offsets_negative", "\"U8\"", "[4]", "[-4,0]", 4, {"data_offsets", "got -4"});
  table.one_tensor("offsets_float", "\"U8\"", "[4]", "[0,4.0]", 4, {"data_offsets", "got 4.0"});
  table.one_tensor("offsets_float_past_2_53", "\"U8\"", "[4]", "[0,9007199254740993.0]", 4,
                   {"data_offsets", "integers"});
  table.one_tensor("offsets_text", "\"U8\"", "[4]", "[\"0\",\"4\"]", 4,
                   {"data_offsets", "got \"0\""});
  table.one_tensor("offsets_2_64", "\"U8\"", "[4]", "[0,18446744073709551615]", 4,
                   {"data_offsets", "integers"});
  table.one_tensor("offsets_wrap", "\"U8\"", "[4]", "[18446744073709551612,0]", 4,
                   {"data_offsets", "integers"});
  table.one_tensor("offsets_backwards", "\"U8\"", "[4]", "[4,0]", 4, {"begin <= end", "[4, 0]"});
  table.one_tensor("offsets_past_end", "\"U8\"", "[5]", "[0,5]", 4,
                   {"within the 4 bytes", "[0, 5]"});
  table.one_tensor("offsets_far_past_end", "\"U8\"", "[9223372036854775807]",
                   "[0,9223372036854775807]", 4, {"within the 4 bytes"});
  table.one_tensor("data_missing", "\"U8\"", "[4]", "[0,4]", 0, {"within the 0 bytes"});
  table.one_tensor("data_cut", "\"U8\"", "[4]", "[0,4]", 3, {"within the 3 bytes"});
  table.one_tensor("hole_at_start", "\"U8\"", "[4]", "[4,8]", 8, {"begin at 0", "hole of 4 bytes"});
  table.header("data_behind_the_end", kGood, {"expected 4 bytes", "got 5"}, 5);
  table.header("data_without_tensors", "{}", {"expected 0 bytes", "got 1"}, 1);
  const std::string a = tensor("a", "\"U8\"", "[4]", "[0,4]");
  const auto two = [&](const std::string& name, const std::string& other, size_t data_bytes,
                       std::vector<std::string> words) {
    table.header(name, object(a + "," + other), std::move(words), data_bytes);
  };
  two("overlap_same", tensor("b", "\"U8\"", "[4]", "[0,4]"), 4, {"tensor 'b'", "overlap", "'a'"});
  two("overlap_partly", tensor("b", "\"U8\"", "[4]", "[2,6]"), 6,
      {"tensor 'b'", "begin at 4", "got 2", "overlap"});
  two("overlap_inside", tensor("b", "\"U8\"", "[2]", "[1,3]"), 4, {"tensor 'b'", "overlap"});
  two("overlap_of_empty", tensor("b", "\"U8\"", "[0]", "[2,2]"), 4, {"tensor 'b'", "overlap"});
  two("hole_between", tensor("b", "\"U8\"", "[4]", "[5,9]"), 9,
      {"tensor 'b'", "begin at 4", "hole of 1 bytes"});
  two("hole_before_empty", tensor("b", "\"U8\"", "[0]", "[6,6]"), 6,
      {"tensor 'b'", "hole of 2 bytes"});
}

void add_indexes(Table& table) {
  const auto map = [](const std::string& entries) { return "{\"weight_map\":{" + entries + "}}"; };
  const std::string good =
      "\"a\":\"one.safetensors\",\"b\":\"one.safetensors\",\"c\":\"two.safetensors\"";
  const std::string plain = "plain name of a .safetensors file";
  table.index("index_empty_file", "", {"byte"});
  table.index("index_not_json", "weight_map", {"byte"});
  table.index("index_cut", map(good).substr(0, 30), {"byte"});
  table.index("index_array", "[]", {"expected an object with weight_map"});
  table.index("index_without_map", "{\"metadata\":{}}", {"expected weight_map"});
  table.index("index_map_array", "{\"weight_map\":[]}", {"weight_map", "an array of 0"});
  table.index("index_map_empty", "{\"weight_map\":{}}", {"weight_map", "an object of 0"});
  table.index("index_metadata_array", "{\"metadata\":[],\"weight_map\":{" + good + "}}",
              {"metadata", "an array of 0"});
  table.index("index_duplicate_tensor", map(good + ",\"a\":\"two.safetensors\""),
              {"duplicate key 'a'"});
  table.index("index_duplicate_map", "{\"weight_map\":{" + good + "},\"weight_map\":{}}",
              {"duplicate key 'weight_map'"});
  table.index("index_nested", "{\"metadata\":" + repeat("[", 100000) + repeat("]", 100000) + "}",
              {"levels of nesting"});
  table.index("index_bad_utf8", map(good + ",\"\xFF\":\"one.safetensors\""), {"invalid UTF-8"});
  table.index("index_file_number", map(good + ",\"d\":1"), {"tensor 'd'", plain, "got 1"});
  table.index("index_file_array", map(good + ",\"d\":[\"one.safetensors\"]"),
              {"tensor 'd'", plain});
  table.index("index_file_empty", map(good + ",\"d\":\"\""), {"tensor 'd'", plain});
  table.index("index_file_parent", map(good + ",\"d\":\"../d.safetensors\""),
              {"tensor 'd'", plain, "../d.safetensors"});
  table.index("index_file_absolute", map(good + ",\"d\":\"/etc/d.safetensors\""),
              {"tensor 'd'", plain});
  table.index("index_file_below", map(good + ",\"d\":\"sub/d.safetensors\""),
              {"tensor 'd'", plain});
  table.index("index_file_backslash", map(good + ",\"d\":\"..\\\\d.safetensors\""),
              {"tensor 'd'", plain});
  table.index("index_file_nul", map(good + ",\"d\":\"one.safetensors\\u0000.safetensors\""),
              {"tensor 'd'", plain});
  table.index("index_file_dots", map(good + ",\"d\":\"..\""), {"tensor 'd'", plain});
  table.index("index_file_suffix_only", map(good + ",\"d\":\".safetensors\""),
              {"tensor 'd'", plain});
  table.index("index_file_other_kind", map(good + ",\"d\":\"model.safetensors.index.json\""),
              {"tensor 'd'", plain});
  table.index("index_file_too_long",
              map(good + ",\"d\":\"" + std::string(300, 'd') + ".safetensors\""),
              {"tensor 'd'", plain});
  table.index("index_shard_missing", map(good + ",\"d\":\"three.safetensors\""),
              {"'three.safetensors'", "not there"});
  table.index("index_tensor_missing", map(good + ",\"d\":\"two.safetensors\""),
              {"tensor 'd'", "'two.safetensors'", "does not hold it"});
  table.directory("index_contradicts_shard",
                  {Table::two_shards()[0],
                   Table::two_shards()[1],
                   {"model.safetensors.index.json",
                    map("\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"")}},
                  {"tensor 'b'", "places it in 'two.safetensors', which does not hold it"});
  table.directory("index_names_bad_shard",
                  {Table::two_shards()[0],
                   {"two.safetensors", safetensors_bytes("{}", 1)},
                   {"model.safetensors.index.json", map(good)}},
                  {"two.safetensors", "expected 0 bytes", "got 1"});
  table.directory("index_shard_is_directory",
                  {Table::two_shards()[0],
                   {"two.safetensors/", ""},
                   {"model.safetensors.index.json", map(good)}},
                  {"two.safetensors", "regular file"});
  table.directory(
      "index_is_directory",
      {Table::two_shards()[0], Table::two_shards()[1], {"model.safetensors.index.json/", ""}},
      {"model.safetensors.index.json", "regular file"});
  table.directory("no_files", {}, {"expected model.safetensors.index.json or *.safetensors files"});
  table.directory("two_files_one_name",
                  {Table::two_shards()[1], {"three.safetensors", Table::two_shards()[1].bytes}},
                  {"tensor 'c'", "holds it too"});
  table.directory("numbered_shard_missing",
                  {{"model-00001-of-00003.safetensors", Table::two_shards()[0].bytes},
                   {"model-00003-of-00003.safetensors", Table::two_shards()[1].bytes}},
                  {"expected the 3 shards", "got 2"});
  table.directory("second_file_bad", {Table::two_shards()[0], {"two.safetensors", "{}"}},
                  {"two.safetensors", "expected at least 8 bytes", "got 2"});
}

}  // namespace

std::string safetensors_bytes(const std::string& header, size_t data_bytes) {
  return le64(header.size()) + header + std::string(data_bytes, '\0');
}

const std::vector<HostileCase>& hostile_cases() {
  static const std::vector<HostileCase> cases = [] {
    Table table;
    add_lengths(table);
    add_json(table);
    add_fields(table);
    add_shapes(table);
    add_offsets(table);
    add_indexes(table);
    return table.take();
  }();
  return cases;
}

void write_hostile_case(const std::filesystem::path& dir, const HostileCase& hostile) {
  std::filesystem::create_directories(dir);
  for (const HostileFile& file : hostile.files) {
    if (file.name.ends_with('/')) {
      std::filesystem::create_directories(dir / file.name);
      continue;
    }
    write_file((dir / file.name).string(), file.bytes);
  }
}

}  // namespace nvfp4_moe::internal::test
