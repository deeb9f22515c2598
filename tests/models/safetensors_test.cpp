#include "dovetail/models/common/safetensors.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>

#include "dovetail/base/error.h"
#include "folder.h"

namespace dovetail::models {
namespace {

void write_raw(const std::filesystem::path& path, const std::string& header,
               const std::string& data, std::optional<uint64_t> length = {}) {
  std::ofstream out(path, std::ios::binary);
  const uint64_t n = length.value_or(header.size());
  out.write(reinterpret_cast<const char*>(&n), 8);
  out << header << data;
}

std::string fault(const std::filesystem::path& path) {
  try {
    SafetensorsFile file(path);
  } catch (const FileError& e) {
    EXPECT_NE(std::string(e.what()).find(path.string()), std::string::npos) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "the file was accepted";
  return {};
}

TEST(Safetensors, RoundTrip) {
  const Folder folder;
  const auto path = folder / "x.safetensors";
  const NamedTensors tensors = {{"a", torch::randn({3, 5})},
                                {"strided", torch::randn({4, 6}).t()},
                                {"b", torch::randn({7}).to(at::kBFloat16)},
                                {"h", torch::randn({2, 2}).to(at::kHalf)},
                                {"scalar", torch::tensor(3.5f)},
                                {"empty", torch::empty({0, 4})},
                                {"long", torch::tensor({1, -2}, at::kLong)},
                                {"flag", torch::tensor({true, false})}};
  write_safetensors(path, tensors, {{"format", "pt"}, {"note", "\"quoted\""}});
  EXPECT_FALSE(std::filesystem::exists(path.string() + ".partial"));
  at::Tensor kept;
  {
    const SafetensorsFile file(path);
    EXPECT_EQ(file.entries().size(), tensors.size());
    EXPECT_EQ(file.metadata().at("note"), "\"quoted\"");
    for (const auto& [name, tensor] : tensors) {
      EXPECT_EQ(file.tensor(name).scalar_type(), tensor.scalar_type());
      EXPECT_TRUE(at::equal(file.tensor(name), tensor)) << name;
    }
    kept = file.tensor("a");
    EXPECT_THROW(file.tensor("c"), FileError);
  }
  kept.add_(1);  // the mapping lives on and is private
  EXPECT_TRUE(at::equal(SafetensorsFile(path).tensor("a"), tensors[0].second));
}

TEST(Safetensors, WritingFaults) {
  const Folder folder;
  const auto one = torch::ones({1});
  EXPECT_THROW(write_safetensors(folder / "no/x", {{"a", one}}), FileError);
  EXPECT_THROW(write_safetensors(folder / "x", {{"a", one}, {"a", one}}), ConfigError);
  EXPECT_THROW(write_safetensors(folder / "x", {{"a", one.to(at::kComplexFloat)}}), ConfigError);
}

TEST(Safetensors, MisalignedDataIsCopied) {
  const Folder folder;
  const std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} )";
  ASSERT_NE((8 + header.size()) % 4, 0u);
  write_raw(folder / "x", header, std::string("\0\0\x80\x3f", 4));
  EXPECT_EQ(SafetensorsFile(folder / "x").tensor("a").item<float>(), 1);
}

TEST(Safetensors, EveryFaultIsNamed) {
  const Folder folder;
  const auto path = folder / "bad.safetensors";
  const auto expect = [&](const std::string& part) {
    const std::string text = fault(path);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const auto tensor = [](const std::string& type, const std::string& shape,
                         const std::string& offsets) {
    return R"({"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  const std::string eight(8, 'x'), good = tensor("F32", "[2]", "[0,8]");
  expect("cannot be opened");
  std::ofstream(path) << "short";
  expect("5 bytes are too few");
  write_raw(path, "{}", "", 1000);
  expect("truncated: the header wants 1008 bytes, the file has 10");
  write_raw(path, "{}", "", uint64_t{1} << 63);
  expect("no safetensors header");
  write_raw(path, "{\"a\":", "");
  expect("not a JSON object");
  write_raw(path, "[1]", "");
  expect("not a JSON object");
  write_raw(path, R"({"a":)" + good + R"(,"a":)" + good + "}", eight);
  expect("tensor a appears twice");
  write_raw(path, R"({"a":{"dtype":"F32"}})", "");
  expect("tensor a: wanted dtype, shape and data_offsets");
  write_raw(path, R"({"a":)" + tensor("F4", "[2]", "[0,8]") + "}", eight);
  expect("tensor a: dtype F4 is not supported");
  write_raw(path, R"({"a":)" + tensor("F32", "[-2]", "[0,8]") + "}", eight);
  expect("tensor a: impossible shape [-2]");
  write_raw(path, R"({"a":)" + tensor("F32", "[1099511627776,1099511627776]", "[0,8]") + "}",
            eight);
  expect("tensor a: impossible shape");
  write_raw(path, R"({"a":)" + tensor("F32", "[2]", "[0,\"8\"]") + "}", eight);
  expect("tensor a: impossible offsets");
  write_raw(path, R"({"a":)" + tensor("F32", "[3]", "[0,8]") + "}", eight);
  expect("tensor a: F32 [3] takes 12 bytes, its offsets hold 8");
  write_raw(path, R"({"a":)" + good + "}", eight.substr(1));
  expect("truncated: tensor a ends at byte 8 of the data, the file has 7");
  write_raw(path, R"({"a":)" + good + "}", eight + "y");
  expect("1 bytes of data after the last tensor");
  write_raw(path, R"({"a":)" + good + R"(,"b":)" + tensor("F32", "[2]", "[4,12]") + "}",
            eight + eight);
  expect("tensor b starts at byte 4 where 8 was wanted");
  write_raw(path, R"({"__metadata__":{"k":1},"a":)" + good + "}", eight);
  expect("metadata k is not text");
  write_raw(path, R"({"a":)" + good + "}", eight);
  EXPECT_NO_THROW(SafetensorsFile{path});
}

TEST(Safetensors, ShardsOfAFolder) {
  const Folder folder;
  write_safetensors(folder / "one.safetensors",
                    {{"a", torch::ones({2})}, {"b", torch::zeros({1})}});
  write_safetensors(folder / "two.safetensors", {{"c", torch::full({3}, 3.0f)}});
  EXPECT_THROW(SafetensorsSet{folder.path()}, FileError);
  const auto index = [&](const std::string& map) {
    std::ofstream(folder / "model.safetensors.index.json")
        << R"({"metadata":{"total_size":24},"weight_map":)" << map << "}";
  };
  index(R"({"a":"one.safetensors","b":"one.safetensors","c":"two.safetensors"})");
  const SafetensorsSet set(folder.path());
  EXPECT_EQ(set.names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(set.tensor("c").sum().item<float>(), 9);
  EXPECT_FALSE(set.contains("d"));
  EXPECT_THROW(set.tensor("d"), FileError);
  index(R"({"a":"two.safetensors","c":"two.safetensors"})");
  EXPECT_THROW(SafetensorsSet{folder.path()}, FileError);
  index(R"({"a":"../one.safetensors"})");
  EXPECT_THROW(SafetensorsSet{folder.path()}, FileError);
  index(R"({"a":"three.safetensors"})");
  EXPECT_THROW(SafetensorsSet{folder.path()}, FileError);
  write_safetensors(folder / "model.safetensors", {{"whole", torch::ones({2})}});
  EXPECT_EQ(SafetensorsSet(folder.path()).names(), std::vector<std::string>{"whole"});
}

}  // namespace
}  // namespace dovetail::models
