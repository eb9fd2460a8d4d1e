// Strict JSON, and text that is safe to print.
#include "safetensors/json_strict.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "safetensors/files.h"
#include "safetensors/output_file.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

using test::TempDir;
using testing::HasSubstr;

std::string refusal(std::string_view text, const JsonLimits& limits = {}) {
  const Result<Json> parsed = parse_json_strict(text, limits);
  if (parsed.ok()) return "accepted";
  EXPECT_EQ(parsed.status().code(), Code::kBadInput);
  return parsed.status().message();
}

TEST(JsonStrict, BuildsTheSameTreeAsNlohmann) {
  for (const char* text :
       {R"({"a":[1,-2,3.5,true,null,"x",{"b":[]}],"é":"名\u0041\n","c":{"d":{"e":[[],[[1]]]}}})", "[]", " {} \n", "12",
        "\"x\"", "null", R"([{"a":1},{"a":2}])", "18446744073709551615", R"({"":{"":""}})"}) {
    const Result<Json> parsed = parse_json_strict(text);
    ASSERT_OK(parsed);
    EXPECT_EQ(parsed->dump(), nlohmann::json::parse(text).dump());
  }
}

TEST(JsonStrict, NamesPositionAndReason) {
  EXPECT_EQ(refusal(R"({"a":1,"a":2})"), "byte 10: duplicate key 'a'");
  EXPECT_EQ(refusal(R"({"x":{"a":1},"y":{"a":1,"b":2,"\u0061":3}})"), "byte 38: duplicate key 'a'");
  EXPECT_EQ(refusal("{\"a\":1}\xC3"), "byte 7: invalid UTF-8 in JSON");
  EXPECT_EQ(refusal(std::string_view("{}\0", 3)), "byte 2: NUL byte in JSON");
  EXPECT_THAT(refusal("{} {}"), testing::StartsWith("byte 4: syntax error"));
  EXPECT_THAT(refusal(""), testing::StartsWith("byte 1: syntax error"));
  EXPECT_THAT(refusal("[1,]"), testing::StartsWith("byte 4: syntax error"));
  EXPECT_THAT(refusal("[-Infinity]"), HasSubstr("invalid number"));
  EXPECT_THAT(refusal("[01]"), HasSubstr("byte 3"));
  EXPECT_THAT(refusal("[\"" + std::string(100000, 'x')), HasSubstr("missing closing quote"));
  EXPECT_LE(refusal("[\"" + std::string(100000, 'x')).size(), 300u);
}

TEST(JsonStrict, KeepsItsLimits) {
  JsonLimits limits;
  limits.max_bytes = 40;
  limits.max_depth = 3;
  limits.max_members = 2;
  limits.max_elements = 4;
  limits.max_values = 9;
  const auto accepted = "accepted";
  EXPECT_EQ(refusal("[[[1]]]", limits), accepted);
  EXPECT_EQ(refusal("[[[[1]]]]", limits), "byte 4: expected at most 3 levels of nesting");
  EXPECT_EQ(refusal(R"([[{"a":{}}]])", limits), "byte 8: expected at most 3 levels of nesting");
  EXPECT_EQ(refusal(R"({"a":1,"b":2})", limits), accepted);
  EXPECT_THAT(refusal(R"({"a":1,"b":2,"c":3})", limits), HasSubstr("at most 2 keys"));
  EXPECT_EQ(refusal("[1,2,3,4]", limits), accepted);
  EXPECT_THAT(refusal("[1,2,3,4,5]", limits), HasSubstr("at most 4 elements"));
  EXPECT_EQ(refusal("[[1,2,3],[1,2,3]]", limits), accepted);  // 9 values
  EXPECT_THAT(refusal("[[1,2,3],[1,2,3,4]]", limits), HasSubstr("at most 9 values"));
  EXPECT_EQ(refusal(std::string(38, ' ') + "{}", limits), accepted);
  EXPECT_EQ(refusal(std::string(39, ' ') + "{}", limits), "JSON: expected at most 40 bytes, got 41");
}

TEST(JsonStrict, OnlyIntegerLiteralsAreIntegers) {
  const auto exact = [](const char* text) { return exact_int64(*parse_json_strict(text)); };
  EXPECT_EQ(exact("0"), 0);
  EXPECT_EQ(exact("-7"), -7);
  EXPECT_EQ(exact("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(exact("-9223372036854775808"), INT64_MIN);
  for (const char* text : {"9223372036854775808", "18446744073709551615", "18446744073709551616",
                           "-9223372036854775809", "2.0", "1e3", "\"2\"", "true", "null", "[2]"})
    EXPECT_EQ(exact(text), std::nullopt) << text;
}

TEST(JsonStrict, FilesNameTheirPath) {
  TempDir dir;
  EXPECT_EQ(read_json_file(dir.file("none.json")).status().code(), Code::kIo);
  EXPECT_OK(write_text_file(dir.file("x.json"), "{\"a\":1}"));
  const auto good = read_json_file(dir.file("x.json"));
  ASSERT_OK(good);
  EXPECT_EQ((*good)["a"], 1);
  EXPECT_OK(write_text_file(dir.file("x.json"), "{"));
  const Status status = read_json_file(dir.file("x.json")).status();
  EXPECT_EQ(status.code(), Code::kBadInput);
  EXPECT_THAT(status.message(), testing::StartsWith(dir.file("x.json") + ": byte"));
  JsonLimits small;
  small.max_bytes = 0;
  EXPECT_THAT(read_json_file(dir.file("x.json"), small).status().message(), HasSubstr("at most 0 bytes, got 1"));
  EXPECT_EQ(read_json_file(dir.path().string()).status().code(), Code::kBadInput);  // a directory
  EXPECT_FALSE(std::filesystem::exists(partial_path(dir.file("x.json"))));
  EXPECT_EQ(write_text_file(dir.file("none/x.json"), "").code(), Code::kIo);
}

TEST(Utf8, FindsTheFirstBadByte) {
  EXPECT_EQ(find_invalid_utf8("a é 名 😀"), std::string::npos);
  EXPECT_EQ(find_invalid_utf8("ab\x80"), 2u);
  EXPECT_EQ(find_invalid_utf8("\xC0\x80"), 0u);
  EXPECT_EQ(find_invalid_utf8("\xE0\x9F\xBF"), 0u);
  EXPECT_EQ(find_invalid_utf8("\xEF\xBF\xBF"), std::string::npos);
  EXPECT_EQ(find_invalid_utf8("x\xED\xA0\x80"), 1u);
  EXPECT_EQ(find_invalid_utf8("\xF0\x8F\xBF\xBF"), 0u);
  EXPECT_EQ(find_invalid_utf8("\xF4\x8F\xBF\xBF"), std::string::npos);
  EXPECT_EQ(find_invalid_utf8("\xF4\x90\x80\x80"), 0u);
  EXPECT_EQ(find_invalid_utf8("\xF8\x88\x80\x80\x80"), 0u);
}

TEST(FiniteFloat, IsANumberOfFloatsRange) {
  EXPECT_EQ(finite_float(Json(0.5)), 0.5f);
  EXPECT_EQ(finite_float(Json(-3)), -3.0f);
  EXPECT_EQ(finite_float(Json(3.4028234663852886e38)), std::numeric_limits<float>::max());
  for (const double number :
       {3.4028235e38, -1e39, 1e300, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    EXPECT_EQ(finite_float(Json(number)), std::nullopt) << number;
  EXPECT_EQ(finite_float(Json("1")), std::nullopt);
  EXPECT_EQ(finite_float(Json(true)), std::nullopt);
  EXPECT_EQ(finite_float(Json()), std::nullopt);
}

TEST(DescribeJson, NamesKindAndSize) {
  EXPECT_EQ(describe_json(Json("a\n")), "\"a\\x0A\"");
  EXPECT_EQ(describe_json(Json::array({1, 2})), "an array of 2");
  EXPECT_EQ(describe_json(Json(2.5)), "2.5");
}

}  // namespace
}  // namespace nvfp4_moe
